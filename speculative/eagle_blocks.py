"""Which tokens an EAGLE head has seen: by sequence, and by block for whoever shares it.

The head's pages lie under the block numbers of the target's first full group. Unlike a draft model
it cannot catch up: what it takes of a token exists in that token's own step and no other. So it
either follows a sequence from its first token on, or finds all that precedes its first step in
blocks that bear a mark: the key of what the head wrote there. A mark goes before anyone writes to
its block. A block that is being filled bears the number of the sequence that fills it.

The last row of a block is paired with the token behind the block, which its key does not cover.
Where several continue one prefix from there, the row is that of whoever computed it: one key in
the attention stands for another continuation, which can cost a draft, and never a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.platform.kv.hashing import KeyChain

if TYPE_CHECKING:
    import torch

    from plait.platform.core import Sequence, Span

Mark = tuple[bytes, tuple[tuple[str, float, int], ...]] | int | None


@dataclass(slots=True)
class HeadState:
    """How far the head is with one sequence."""

    sequence: Sequence
    epoch: int
    chain: KeyChain
    is_followed: bool = False  # every token so far was seen
    num_seen: int = 0  # positions 0 … num_seen - 1 have their rows
    num_marked: int = 0  # blocks
    hidden: torch.Tensor | None = None  # [D], what the last of them gave
    first: tuple[int, float] | None = None  # what that says comes next, of the head; its chance
    num_unasked: int = 0  # steps since drafts were wanted


class HeadBlocks:
    """The states of sequences and the marks of blocks.

    `group` is the target's KV group whose tables hold, with `num_blocks` blocks; `num_scratch` more
    lie behind them, for drafts at positions that have no block yet.
    """

    def __init__(self, *, block_size: int, group: int, num_blocks: int, num_scratch: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks + num_scratch
        self.num_unseen = 0  # sequences that came with tokens which the head had not seen
        self._group = group
        self._first_scratch = num_blocks
        self._marks: list[Mark] = [None] * num_blocks
        self._states: dict[int, HeadState] = {}
        self._next_scratch = num_blocks

    @property
    def num_followed(self) -> int:
        """Sequences that can have drafts."""
        return sum(state.is_followed for state in self._states.values())

    # --- drafts ----------------------------------------------------------------------------------

    def ready(self, sequence: Sequence) -> HeadState | None:
        """The state of a sequence whose tokens, all but the last, were seen."""
        state = self._states.get(sequence.seq_id)
        if state is None or state.sequence is not sequence or not state.is_followed:
            return None
        if state.epoch != sequence.epoch or state.num_seen != len(sequence.tokens) - 1:
            return None
        return state

    def begin_round(self) -> None:
        """A round of drafts begins: the scratch of the last one is free."""
        self._next_scratch = self._first_scratch

    def draft_table(self, sequence: Sequence, end: int) -> list[int]:
        """Blocks for positions before `end`: the sequence's own, then scratch while there is any.

        Drafts in its own blocks are written anew once the target has verified them.
        """
        table = list(sequence.block_ids[self._group])
        for block in table[-(-(len(sequence.tokens) - 1) // self.block_size) :]:
            self._marks[block] = None
        while len(table) * self.block_size < end and self._next_scratch < self.num_blocks:
            table.append(self._next_scratch)
            self._next_scratch += 1
        return table

    # --- steps -----------------------------------------------------------------------------------

    def expects(self, span: Span) -> bool:
        """Whether rows of the span can be of use, before the span is computed."""
        state = self._state(span)
        return state is None or state.is_followed

    def begin(self, span: Span, *, is_wanted: bool) -> HeadState:
        """The target computes a span; whether the head follows is in the state.

        Not `is_wanted`: the span's rows will not be seen.
        """
        state = self._state(span)
        if state is None:
            state = self._open(span.sequence)
            if is_wanted:
                self._resume(state, span)
        elif state.is_followed and span.start != state.num_seen:
            self._resume(state, span)
        state.is_followed &= is_wanted
        size, table = self.block_size, span.block_ids[self._group]
        first, end = span.start // size, -(-(span.start + span.num_tokens) // size)
        for block in table[first:end]:
            self._marks[block] = None
        state.num_marked = min(state.num_marked, first)
        return state

    def seen(self, state: HeadState, span: Span, num_rows: int, new: SequenceOf[int]) -> None:
        """The span's first `num_rows` rows are written; `new` tokens stand behind the known."""
        size, table = self.block_size, span.block_ids[self._group]
        state.num_seen = span.start + num_rows
        full = state.num_seen // size
        if full > state.num_marked:
            state.chain.extend([*span.sequence.tokens, *new], full)
            for i in range(state.num_marked, full):
                self._marks[table[i]] = self._key(state, i)
            state.num_marked = full
        if state.num_seen % size:
            self._marks[table[full]] = span.sequence.seq_id

    def lose(self, sequence: Sequence) -> None:
        """Rows of a sequence were not written: it is followed no longer."""
        state = self._states.get(sequence.seq_id)
        if state is not None:
            state.is_followed = False

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended; full blocks stay marked."""
        state = self._states.get(sequence.seq_id)
        if state is not None and state.sequence is sequence:
            del self._states[sequence.seq_id]

    def _state(self, span: Span) -> HeadState | None:
        """The state of the span's sequence, unless it begins anew."""
        state = self._states.get(span.sequence.seq_id)
        if state is None or state.sequence is not span.sequence:
            return None
        return state if state.epoch == span.sequence.epoch and span.start > 0 else None

    def _open(self, sequence: Sequence) -> HeadState:
        chain = KeyChain(sequence.request, self.block_size)
        state = HeadState(sequence=sequence, epoch=sequence.epoch, chain=chain)
        self._states[sequence.seq_id] = state
        return state

    def _resume(self, state: HeadState, span: Span) -> None:
        """Follow from where a span starts, if all before it was seen by somebody."""
        size, table = self.block_size, span.block_ids[self._group]
        full = span.start // size
        state.chain.extend(span.sequence.tokens, full)
        state.is_followed = all(self._marks[table[i]] == self._key(state, i) for i in range(full))
        if span.start % size:
            state.is_followed &= self._marks[table[full]] == span.sequence.seq_id
        state.num_seen, state.num_marked = span.start, full
        self.num_unseen += not state.is_followed

    def _key(self, state: HeadState, block: int) -> Mark:
        """Adapters that leave K and V alone can still change what is tapped: all count."""
        end = (block + 1) * self.block_size
        uses = state.sequence.request.adapters
        active = tuple((u.generation, u.scale, u.active_from) for u in uses if u.active_from < end)
        return state.chain.keys[block], active

    # --- integrity -------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless all states belong to `sequences`, the unfinished."""
        known = {sequence.seq_id: sequence for sequence in sequences}
        for seq_id, state in self._states.items():
            assert known.get(seq_id) is state.sequence, "a state of a sequence that has ended"
            if self.ready(state.sequence) is None:
                continue
            table = state.sequence.block_ids[self._group]
            assert len(table) * self.block_size >= state.num_seen, "seen without a block"
            for i in range(state.num_marked):
                assert self._marks[table[i]] == self._key(state, i), "a block under a wrong mark"
