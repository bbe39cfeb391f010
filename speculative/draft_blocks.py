"""What the draft model has K and V of: by sequence, and by block for whoever shares it.

The draft model's pages lie under the block numbers of the target's first full group, so that
growing, sharing, parking and freeing are the target's alone:

    block        0     1 … N-1                      N … N+S-1
                 null  as the target hands them out scratch, for positions behind a table

A prefix hit of the target says nothing of the draft model, which may have been busy elsewhere when
the block was filled. So each block has a mark: the key of the content that the draft model wrote
there, by a chain of its own (its adapters are others). A mark is set when the block is full, and
goes before anything is written there. Who comes to blocks that others filled takes over those that
bear its own keys, and computes the rest; two that do so at once write equal values.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.platform.kv.hashing import KeyChain

if TYPE_CHECKING:
    from plait.platform.core import AdapterUse, Sequence


def draft_adapters(uses: Iterable[AdapterUse]) -> tuple[AdapterUse, ...]:
    """The draft model's adapters that go with a request's: placed where those are, as strong."""
    return tuple(
        replace(use, generation=use.draft, kv_digest=use.draft, draft="")
        for use in uses
        if use.draft
    )


@dataclass(slots=True)
class DraftState:
    """How far the draft model is with one sequence."""

    sequence: Sequence
    view: Sequence  # the same tokens with the draft model's adapters
    epoch: int
    chain: KeyChain
    num_computed: int = 0  # verified tokens whose K and V lie in the sequence's own blocks
    ahead: tuple[int, ...] = ()  # unverified tokens behind all verified ones, of which they do too
    num_marked: int = 0  # blocks

    @property
    def num_missing(self) -> int:
        """Verified tokens that are not computed."""
        return len(self.sequence.tokens) - self.num_computed


class DraftBlocks:
    """The states of sequences and the marks of blocks.

    `group` is the target's KV group whose tables hold, with `num_blocks` blocks.
    """

    def __init__(self, *, block_size: int, group: int, num_blocks: int, num_scratch: int) -> None:
        self.block_size = block_size
        self._group = group
        self._num_blocks = num_blocks
        self._num_scratch = num_scratch
        self._marks: list[bytes | None] = [None] * num_blocks
        self._states: dict[int, DraftState] = {}
        self._free = 0  # scratch blocks not in use

    def __len__(self) -> int:
        return len(self._states)

    def begin(self) -> None:
        """A round of drafts begins: the scratch of the last one is free."""
        self._free = self._num_scratch

    def take_scratch(self) -> int | None:
        """A block of nobody's, until the next round; None where there is none left."""
        if not self._free:
            return None
        self._free -= 1
        return self._num_blocks + self._free

    def table(self, sequence: Sequence) -> list[int]:
        """The sequence's own blocks."""
        return sequence.block_ids[self._group]

    # --- sequences -------------------------------------------------------------------------------

    def follow(self, sequence: Sequence) -> DraftState:
        """The state of a running sequence, now that steps have passed."""
        state = self._states.get(sequence.seq_id)
        if state is None or state.sequence is not sequence:
            state = self._states[sequence.seq_id] = self._open(sequence)
        elif state.epoch != sequence.epoch:  # parked since: blocks may have gone
            state.epoch = sequence.epoch
            state.num_computed = state.num_marked = 0
            state.ahead = ()
        state.view.tokens = sequence.tokens
        self._accept(state)
        self._take_over(state)
        return state

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence; what it leaves in blocks stays marked."""
        state = self._states.get(sequence.seq_id)
        if state is None or state.sequence is not sequence:
            return
        if state.epoch == sequence.epoch:
            self._accept(state)  # its last drafts, if it still holds its blocks
        del self._states[sequence.seq_id]

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence of which nobody knows what was written."""
        self._states.pop(sequence.seq_id, None)

    def _open(self, sequence: Sequence) -> DraftState:
        view, request = sequence, sequence.request
        if request.adapters or request.images:  # of images it sees the placeholders alone
            adapters = draft_adapters(request.adapters)
            request = replace(request, adapters=adapters, images=())
            view = replace(sequence, request=request)
        chain = KeyChain(request, self.block_size)
        return DraftState(sequence=sequence, view=view, epoch=sequence.epoch, chain=chain)

    def _accept(self, state: DraftState) -> None:
        """Count the drafts that were verified meanwhile; the others are garbage."""
        if not state.ahead:
            return
        new = state.sequence.tokens[state.num_computed :]
        num_held = 0
        for token, ahead in zip(new, state.ahead, strict=False):
            if token != ahead:
                break
            num_held += 1
        state.num_computed += num_held
        all_held = num_held == len(new)
        state.ahead = state.ahead[num_held:] if all_held else ()
        self._mark(state)

    def _take_over(self, state: DraftState) -> None:
        """Skip blocks that bear this sequence's keys, from where it stands."""
        size, tokens, table = self.block_size, state.sequence.tokens, self.table(state.sequence)
        full = min(len(tokens) // size, len(table))
        at = first = state.num_computed // size
        if at >= full:
            return
        keys = state.chain.extend(tokens, full)
        while at < full and self._marks[table[at]] == keys[at]:
            at += 1
        if at > first:
            state.num_computed, state.num_marked = at * size, at
            state.ahead = ()

    # --- writes ----------------------------------------------------------------------------------

    def will_write(self, state: DraftState, start: int, end: int) -> None:
        """Positions start … end - 1 are about to be written: what was there is gone."""
        table = self.table(state.sequence)
        first = start // self.block_size
        for block in table[first : -(-end // self.block_size)]:
            self._marks[block] = None
        state.num_marked = min(state.num_marked, first)

    def wrote(self, state: DraftState, end: int, drafts: SequenceOf[int]) -> None:
        """All before `end` is written, as far as there are blocks for it.

        `drafts` stand behind the verified tokens.
        """
        num_known = len(state.sequence.tokens)
        own = min(end, len(self.table(state.sequence)) * self.block_size)
        state.num_computed = min(own, num_known)
        state.ahead = tuple(drafts[: max(0, own - num_known)])
        self._mark(state)

    def _mark(self, state: DraftState) -> None:
        table = self.table(state.sequence)
        full = min(state.num_computed // self.block_size, len(table))
        if full <= state.num_marked:
            return
        keys = state.chain.extend(state.sequence.tokens, full)
        for i in range(state.num_marked, full):
            self._marks[table[i]] = keys[i]
        state.num_marked = full

    # --- integrity -------------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless states and marks agree; `sequences` are the unfinished."""
        known = {sequence.seq_id: sequence for sequence in sequences}
        for seq_id, state in self._states.items():
            assert known.get(seq_id) is state.sequence, "a state of a sequence that has ended"
            if state.epoch == state.sequence.epoch:
                self._check_state(state)

    def _check_state(self, state: DraftState) -> None:
        table, tokens = self.table(state.sequence), state.sequence.tokens
        assert state.num_computed <= len(tokens), "more computed than there is"
        assert state.num_computed <= len(table) * self.block_size, "computed without a block"
        num_ahead = state.num_computed + len(state.ahead)
        assert num_ahead <= len(table) * self.block_size, "drafts without a block"
        full = state.num_computed // self.block_size
        for block, key in zip(table, state.chain.extend(tokens, full)[:full], strict=False):
            # A sequence that shares it may be writing the same once more.
            assert self._marks[block] in (None, key), "a block under a wrong mark"
