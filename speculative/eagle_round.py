"""A round of an EAGLE head's drafts: a chain of tokens for each sequence, one pass for each depth.

plain      the likeliest tokens are wanted, and nothing stands before them: all depths of all
such chains are one call
others     those with a grammar, with forced text before, or that are not greedy: a pass for
each depth, each token chosen by `eagle_choice`
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.speculative.choice import MAX_LOGIT_ROWS, Floats, ends
from plait.speculative.eagle_head import HeadRows
from plait.speculative.eagle_program import Starts

if TYPE_CHECKING:
    from plait.platform.core import Sequence
    from plait.speculative.eagle_blocks import HeadBlocks
    from plait.speculative.eagle_choice import HeadChoice
    from plait.speculative.eagle_head import EagleHead
    from plait.speculative.source import Want


@dataclass(slots=True, kw_only=True, eq=False)
class Chain:
    """One sequence in a round. Token i stands at position `start + 1 + i`, behind row `start + i`.

    `hidden` is what the last row gave: it predicts the next token.
    """

    want: Want
    hidden: torch.Tensor
    start: int  # position of the first row
    first: tuple[int, float] | None  # its first token, of the head, and chance, if known
    table: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # those of others, then ours
    chances: list[float] = field(default_factory=list)

    @property
    def num_chosen(self) -> int:
        """Tokens chosen in this round; the pass before the first went along with the target's."""
        return len(self.tokens) - (self.first is not None)

    @property
    def is_given(self) -> bool:
        """Whether the next token is one of the others'."""
        return len(self.tokens) < len(self.want.after)

    @property
    def num_drafted(self) -> int:
        """Tokens of ours."""
        return len(self.tokens) - len(self.want.after)


class HeadRounds:
    """Makes rounds with a head, of the sequences that stand ready in `blocks`.

    `takes_likeliest` tells of which sequences the target's choice is each row's largest value.
    """

    def __init__(
        self,
        head: EagleHead,
        blocks: HeadBlocks,
        choice: HeadChoice,
        takes_likeliest: Callable[[Sequence], bool],
        *,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._head = head
        self._blocks = blocks
        self._choice = choice
        self._takes_likeliest = takes_likeliest
        self._eos_token_ids = eos_token_ids
        self.num_forwards = 0
        self.num_rows = 0

    def is_plain(self, sequence: Sequence) -> bool:
        """Whether its next tokens are the likeliest of the head's."""
        return (
            sequence.request.grammar is None
            and self._head.drafts_greedily
            and self._takes_likeliest(sequence)
        )

    def draft(self, wants: SequenceOf[Want]) -> list[Chain | None]:
        """A chain for each of `wants`; None where the head is not ready for the sequence."""
        self._blocks.begin_round()
        chains = [self._open(want) for want in wants]
        opened = [chain for chain in chains if chain is not None]
        plain = [chain for chain in opened if self._draws_likeliest(chain)]
        deeper = [chain for chain in plain if not self._ends_at_first(chain)]
        if deeper:
            self._draft_likeliest(deeper)
        others = [chain for chain in opened if chain not in plain]
        for chain in others:
            self._lay(chain)
        going = self._extend([chain for chain in others if not chain.tokens])
        while going:
            self._forward(going)
            going = self._extend(going)
        return chains

    def _open(self, want: Want) -> Chain | None:
        state = self._blocks.ready(want.sequence)
        if state is None or state.hidden is None or want.limit < 1:
            return None
        state.num_unasked = 0
        start = len(want.sequence.tokens) - 1
        first = state.first if not want.after and self.is_plain(want.sequence) else None
        return Chain(want=want, hidden=state.hidden, start=start, first=first)

    def _lay(self, chain: Chain) -> None:
        """Find room for the rows of a chain."""
        want = chain.want
        end = chain.start + len(want.after) + want.limit + want.extra - 1
        chain.table = self._blocks.draft_table(want.sequence, end)

    def _draws_likeliest(self, chain: Chain) -> bool:
        return not chain.want.after and self.is_plain(chain.want.sequence)

    def _ends_at_first(self, chain: Chain) -> bool:
        """Whether the first token is known and the only one; then the chain has it."""
        if chain.first is None:
            return False
        place, chance = chain.first
        token, want = self._choice.target_id(place), chain.want
        is_last = want.limit == 1 and (not want.extra or chance < want.floor)
        if not is_last and not ends(want.sequence, token, self._eos_token_ids):
            return False
        chain.tokens.append(token)
        chain.chances.append(chance)
        return True

    def _draft_likeliest(self, chains: SequenceOf[Chain]) -> None:
        """All tokens of these chains, in one call."""
        size = self._blocks.block_size
        for chain in chains:
            self._lay(chain)
        depths = [
            min(c.want.limit + c.want.extra, len(c.table) * size - c.start + 1) for c in chains
        ]
        firsts = [chain.first for chain in chains if chain.first is not None]
        if len(firsts) < len(chains):  # those of all, or of none
            firsts = []
            for chain in chains:
                chain.first = None
        hidden = [chain.hidden for chain in chains]
        found = self._head.draft(
            Starts(
                hidden=torch.stack(hidden) if len(hidden) > 1 else hidden[0][None],
                positions=[chain.start for chain in chains],
                depths=depths,
                sure=[chain.want.limit for chain in chains],
                first_tokens=[token for token, _ in firsts],
                first_chances=[chance for _, chance in firsts],
                block_table=torch.from_numpy(_tables(chains)),
                floor=max(chain.want.floor for chain in chains),
            )
        )
        tokens, chances = found.token_ids.tolist(), found.chances.tolist()
        for chain, places, own in zip(chains, tokens, chances, strict=True):
            self._take(chain, places, own)
        self.num_forwards += found.num_forwards
        self.num_rows += found.num_rows

    def _take(self, chain: Chain, places: SequenceOf[int], chances: SequenceOf[float]) -> None:
        """What a call drafted, up to a token that ends the answer."""
        for place, chance in zip(places, chances, strict=True):
            if place < 0:
                break
            chain.tokens.append(self._choice.target_id(place))
            chain.chances.append(chance)
            if ends(chain.want.sequence, chain.tokens[-1], self._eos_token_ids):
                break

    def _extend(self, chains: SequenceOf[Chain]) -> list[Chain]:
        """Give each chain its next token; returns those that go on."""
        going = []
        choosing = []
        for chain in chains:
            if not chain.is_given:
                choosing.append(chain)
                continue
            chain.tokens.append(chain.want.after[len(chain.tokens)])
            is_known = chain.tokens[-1] < self._choice.vocab_size
            if is_known and self._has_room(chain):
                going.append(chain)
        for begin in range(0, len(choosing), MAX_LOGIT_ROWS):
            some = choosing[begin : begin + MAX_LOGIT_ROWS]
            logits: Floats = self._head.logits(torch.stack([c.hidden for c in some])).numpy()
            going += [c for c, row in zip(some, logits, strict=True) if self._choose_next(c, row)]
        return going

    def _forward(self, chains: SequenceOf[Chain]) -> None:
        """One row more for each chain, with the token that it was given last."""
        size = self._blocks.block_size
        positions = np.array([chain.start + len(chain.tokens) - 1 for chain in chains])
        tables = _tables(chains)
        blocks = tables[np.arange(len(chains)), positions // size].astype(np.int64)
        hidden = self._head.forward(
            HeadRows(
                hidden=torch.stack([chain.hidden for chain in chains]),
                token_ids=torch.tensor([chain.tokens[-1] for chain in chains]),
                positions=torch.from_numpy(positions),
                query_start=torch.arange(len(chains) + 1, dtype=torch.int32),
                seq_lens=torch.from_numpy((positions + 1).astype(np.int32)),
                slot_mapping=torch.from_numpy(blocks * size + positions % size),
                block_table=torch.from_numpy(tables),
            )
        )
        for chain, row in zip(chains, hidden, strict=True):
            chain.hidden = row
        self.num_forwards += 1
        self.num_rows += len(chains)

    def _choose_next(self, chain: Chain, logits: Floats) -> bool:
        """Choose the next token of a chain; False: there is none, or it is the last."""
        found = self._choice.next(chain.want.sequence, tuple(chain.tokens), logits)
        if found is None:
            return False
        token, chance = found
        chain.tokens.append(token)
        chain.chances.append(chance)
        return self._goes_on(chain, token)

    def _goes_on(self, chain: Chain, token: int) -> bool:
        want, num = chain.want, chain.num_drafted
        if num >= want.limit + want.extra or token >= self._choice.vocab_size:
            return False
        if ends(chain.want.sequence, token, self._eos_token_ids):
            return False
        if num >= want.limit and math.prod(chain.chances) < want.floor:
            return False
        return self._has_room(chain)

    def _has_room(self, chain: Chain) -> bool:
        """Whether there is a slot for one row more."""
        return len(chain.table) * self._blocks.block_size >= chain.start + len(chain.tokens)


def _tables(chains: SequenceOf[Chain]) -> np.ndarray:
    tables = np.zeros((len(chains), max(len(c.table) for c in chains)), np.int32)
    for row, chain in zip(tables, chains, strict=True):
        row[: len(chain.table)] = chain.table
    return tables
