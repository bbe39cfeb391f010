"""Drafts by an EAGLE-3 head, from what the target has between its layers.

The head goes along with every step: `ingest` gives it the tapped rows of what the step verified,
each paired with the token that follows it, at the cost of about one layer. So it stands ready
behind the last token of each sequence that it follows, and a round of drafts is one pass of the
head per depth, over all sequences at once.

What it wrote for drafts is written anew when their tokens come to be verified, this time from the
target's rows. Nothing here can change a text; what fails here costs drafts, never a request.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.speculative.draft_model import (
    MAX_FAULTS,
    MAX_LOGIT_ROWS,
    MIN_TEMPERATURE,
    Choose,
    Floats,
    Mask,
    ends,
)
from plait.speculative.eagle_blocks import HeadBlocks, HeadState
from plait.speculative.eagle_head import EagleHead, HeadRows
from plait.speculative.eagle_program import Followed, Starts
from plait.speculative.source import Draft, Round, Want

if TYPE_CHECKING:
    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence, Span, StepPlan, StepResult

log = logging.getLogger(__name__)

SOURCE = "eagle"
# The first token of a draft is chosen as the head goes along, which saves a call, for so many
# sequences at most, and as long as drafts were wanted within so many steps.
MAX_FIRST, ASKED_AGAIN = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBounds:
    """What the head has to keep to."""

    block_size: int
    group: int  # of the target, under whose block numbers the pages lie
    num_blocks: int  # of that group
    num_scratch: int  # blocks behind them
    vocab_size: int  # of the target
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Chain:
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


class EagleSource:
    """Implements `source.ModelSource`. Belongs to the engine's thread.

    The pages of `head` are allocated. `follows` tells of each sequence, at each of its steps,
    whether the head shall go along; one that it ever left has no drafts any more. `mask` may be
    missing as long as nobody asks for drafts of a sequence with a grammar.
    """

    def __init__(
        self,
        head: EagleHead,
        bounds: HeadBounds,
        *,
        choose: Choose,
        takes_likeliest: Callable[[Sequence], bool] = lambda _sequence: False,
        mask: Mask | None = None,
        follows: Callable[[Sequence], bool] = lambda _sequence: True,
    ) -> None:
        """`takes_likeliest` tells of which sequences `choose` gives each row's largest value."""
        self.name = SOURCE
        self.last = Round()
        self.head = head
        self.taps = head.taps
        self._bounds = bounds
        self._choose = choose
        self._takes_likeliest = takes_likeliest
        self._mask = mask
        self._follows = follows
        self._blocks = HeadBlocks(
            block_size=bounds.block_size,
            group=bounds.group,
            num_blocks=bounds.num_blocks,
            num_scratch=bounds.num_scratch,
        )
        ids = head.target_ids
        self._ids = np.arange(head.config.draft_vocab_size) if ids is None else ids.numpy()
        self._places = np.zeros(bounds.vocab_size, np.int64)  # of its tokens in its rows
        self._places[self._ids] = np.arange(len(self._ids))
        self._counts = {"rounds": 0, "forwards": 0, "rows": 0, "ingested_rows": 0, "faults": 0}
        self._seconds = self._ingest_seconds = 0.0
        self._faults_in_a_row = 0

    # --- what the engine asks --------------------------------------------------------------------

    @property
    def is_off(self) -> bool:
        """Whether it failed so often that it is left alone."""
        return self._faults_in_a_row >= MAX_FAULTS

    @property
    def figures(self) -> dict[str, float]:
        """Counters since the start, and sequences followed now.

        `unseen_sequences` came with cached tokens that the head had not seen.
        """
        return {
            **self._counts,
            "seconds": self._seconds,
            "ingest_seconds": self._ingest_seconds,
            "sequences": self._blocks.num_followed,
            "unseen_sequences": self._blocks.num_unseen,
        }

    def knows_first(self, sequence: Sequence) -> bool:
        """See `TappedSource.knows_first`."""
        state = self._blocks.ready(sequence)
        return state is not None and state.first is not None and self._is_plain(sequence)

    def takes(self, sequence: Sequence) -> bool:
        """See `ModelSource.takes`: whether it has seen all of the sequence up to now."""
        can_obey = self._mask is not None or sequence.request.grammar is None
        return can_obey and not self.is_off and self._blocks.ready(sequence) is not None

    def lag(self, sequence: Sequence) -> int:
        """See `ModelSource.lag`: it never lags, for it cannot catch up."""
        del sequence
        return 0

    def release(self, sequence: Sequence) -> None:
        """See `ModelSource.release`."""
        self._blocks.release(sequence)

    def check_integrity(self, sequences: SequenceOf[Sequence]) -> None:
        """Raise AssertionError unless all that is kept belongs to `sequences`, the unfinished."""
        self._blocks.check_integrity(sequences)

    # --- going along -----------------------------------------------------------------------------

    def wants_taps(self, plan: StepPlan) -> bool:
        """Whether the step is to be computed by `forward_tapped(batch, source.taps)`."""
        return not self.is_off and any(
            self._blocks.expects(span) and self._follows(span.sequence) for span in plan.spans
        )

    def ingest(
        self,
        plan: StepPlan,
        batch: StepBatch,
        taps: torch.Tensor | None,
        result: StepResult,
    ) -> float:
        """Take in a step: once for each that is computed, after sampling and before its commit.

        `taps`: what `forward_tapped` gave beside the hidden rows; None where the step went without.
        Returns the seconds that it took.
        """
        began = time.perf_counter()
        try:
            states = [
                self._blocks.begin(s, is_wanted=taps is not None and self._follows(s.sequence))
                for s in plan.spans
            ]
            if taps is not None:
                self._ingest(plan, batch, taps, result, states)
        except Exception:
            log.exception("the draft head failed in step %d", plan.step_id)
            self._count_fault(span.sequence for span in plan.spans)
        seconds = time.perf_counter() - began
        self._ingest_seconds += seconds
        return seconds

    def _ingest(
        self,
        plan: StepPlan,
        batch: StepBatch,
        taps: torch.Tensor,
        result: StepResult,
        states: SequenceOf[HeadState],
    ) -> None:
        taken: list[tuple[int, list[int]]] = []  # (span, the tokens behind its rows)
        for s, (span, state) in enumerate(zip(plan.spans, states, strict=True)):
            if not state.is_followed:
                continue
            found = result.spans[s]
            behind = _behind(span, found.token_ids)
            is_known = max(behind, default=0) < self._bounds.vocab_size
            if found.error is None and behind and is_known:
                taken.append((s, behind))
            else:
                self._blocks.lose(span.sequence)
        if not taken:
            return
        drafts = len(taken) <= MAX_FIRST and any(
            states[s].num_unasked < ASKED_AGAIN and self._is_plain(plan.spans[s].sequence)
            for s, _ in taken
        )
        ahead = self.head.follow(self._rows(plan.spans, batch, taps, taken, drafts=drafts))
        for at, (s, behind) in enumerate(taken):
            state = states[s]
            state.hidden = ahead.hidden[at]
            state.first = ahead.next[at] if ahead.next and ahead.next[at][0] >= 0 else None
            state.num_unasked += 1
            self._blocks.seen(state, plan.spans[s], len(behind), result.spans[s].token_ids)
            self._counts["ingested_rows"] += len(behind)

    def _rows(
        self,
        spans: SequenceOf[Span],
        batch: StepBatch,
        taps: torch.Tensor,
        taken: SequenceOf[tuple[int, list[int]]],
        *,
        drafts: bool,
    ) -> Followed:
        """The first rows of some spans, as many as there are tokens behind them."""
        # Few rows, mostly: lists are quicker than arrays here.
        first_rows = list(itertools.accumulate((span.num_tokens for span in spans), initial=0))
        rows: list[int] = []
        for s, behind in taken:
            rows += range(first_rows[s], first_rows[s] + len(behind))
        table = batch.block_tables[self._bounds.group]
        if len(taken) < len(table):
            table = table[[s for s, _ in taken]]
        return Followed(
            taps=taps if len(rows) > rows[-1] else taps[rows],
            token_ids=[token for _, behind in taken for token in behind],
            starts=[spans[s].start for s, _ in taken],
            counts=[len(behind) for _, behind in taken],
            block_table=torch.from_numpy(table),
            drafts=drafts,
        )

    # --- drafting --------------------------------------------------------------------------------

    def propose(self, wants: SequenceOf[Want]) -> list[Draft | None]:
        """See `ModelSource.propose`. None for a sequence that the head does not follow.

        A fault ends the round without drafts; after some in a row there are none any more.
        """
        self.last = Round()
        if self.is_off or not wants:
            return [None] * len(wants)
        began = time.perf_counter()
        chains: list[_Chain | None] = [None] * len(wants)
        try:
            chains = self._round(wants)
        except Exception:
            log.exception("the draft head failed with %d sequences", len(wants))
            self._count_fault(want.sequence for want in wants)
        drafts = [None if chain is None else _draft(chain) for chain in chains]
        if any(drafts):
            self._faults_in_a_row = 0
        seconds = time.perf_counter() - began
        self._seconds += seconds
        self._counts["rounds"] += 1
        depths = [chain.num_chosen for chain in chains if chain is not None and chain.num_drafted]
        self.last = Round(
            seconds=seconds, num_forwards=max(depths, default=0), num_rows=sum(depths)
        )
        return drafts

    def _count_fault(self, sequences: Iterable[Sequence]) -> None:
        self._counts["faults"] += 1
        self._faults_in_a_row += 1
        for sequence in sequences:
            self._blocks.lose(sequence)
        if self.is_off:
            log.error("the draft head failed %d times in a row: it is left alone", MAX_FAULTS)

    def _round(self, wants: SequenceOf[Want]) -> list[_Chain | None]:
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

    def _open(self, want: Want) -> _Chain | None:
        state = self._blocks.ready(want.sequence)
        if state is None or state.hidden is None or want.limit < 1:
            return None
        state.num_unasked = 0
        start = len(want.sequence.tokens) - 1
        first = state.first if not want.after and self._is_plain(want.sequence) else None
        return _Chain(want=want, hidden=state.hidden, start=start, first=first)

    def _lay(self, chain: _Chain) -> None:
        """Find room for the rows of a chain."""
        want = chain.want
        end = chain.start + len(want.after) + want.limit + want.extra - 1
        chain.table = self._blocks.draft_table(want.sequence, end)

    def _draws_likeliest(self, chain: _Chain) -> bool:
        return not chain.want.after and self._is_plain(chain.want.sequence)

    def _is_plain(self, sequence: Sequence) -> bool:
        """Whether its next tokens are the likeliest of the head's."""
        return (
            sequence.request.grammar is None
            and self.head.drafts_greedily
            and self._takes_likeliest(sequence)
        )

    def _ends_at_first(self, chain: _Chain) -> bool:
        """Whether the first token is known and the only one; then the chain has it."""
        if chain.first is None:
            return False
        place, chance = chain.first
        token, want = int(self._ids[place]), chain.want
        is_last = want.limit == 1 and (not want.extra or chance < want.floor)
        if not is_last and not ends(want.sequence, token, self._bounds.eos_token_ids):
            return False
        chain.tokens.append(token)
        chain.chances.append(chance)
        return True

    def _draft_likeliest(self, chains: SequenceOf[_Chain]) -> None:
        """All tokens of these chains, in one call."""
        size = self._bounds.block_size
        for chain in chains:
            self._lay(chain)
        depths = [
            min(c.want.limit + c.want.extra, len(c.table) * size - c.start + 1) for c in chains
        ]
        firsts = [chain.first for chain in chains if chain.first is not None]
        if len(firsts) < len(chains):
            firsts = []
            for chain in chains:
                chain.first = None
        hidden = [chain.hidden for chain in chains]
        found = self.head.draft(
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
            for place, chance in zip(places, own, strict=True):
                if place < 0:
                    break
                chain.tokens.append(int(self._ids[place]))
                chain.chances.append(chance)
                if ends(chain.want.sequence, chain.tokens[-1], self._bounds.eos_token_ids):
                    break
        self._counts["forwards"] += found.num_forwards
        self._counts["rows"] += found.num_rows

    def _extend(self, chains: SequenceOf[_Chain]) -> list[_Chain]:
        """Give each chain its next token; returns those that go on."""
        going = []
        choosing = []
        for chain in chains:
            if not chain.is_given:
                choosing.append(chain)
                continue
            chain.tokens.append(chain.want.after[len(chain.tokens)])
            is_known = chain.tokens[-1] < self._bounds.vocab_size
            if is_known and self._has_room(chain):
                going.append(chain)
        for begin in range(0, len(choosing), MAX_LOGIT_ROWS):
            some = choosing[begin : begin + MAX_LOGIT_ROWS]
            logits: Floats = self.head.logits(torch.stack([c.hidden for c in some])).numpy()
            going += [c for c, row in zip(some, logits, strict=True) if self._choose_next(c, row)]
        return going

    def _forward(self, chains: SequenceOf[_Chain]) -> None:
        """One row more for each chain, with the token that it was given last."""
        size = self._bounds.block_size
        positions = np.array([chain.start + len(chain.tokens) - 1 for chain in chains])
        tables = _tables(chains)
        blocks = tables[np.arange(len(chains)), positions // size].astype(np.int64)
        hidden = self.head.forward(
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
        self._counts["forwards"] += 1
        self._counts["rows"] += len(chains)

    # --- choosing --------------------------------------------------------------------------------

    def _choose_next(self, chain: _Chain, logits: Floats) -> bool:
        """Choose the next token of a chain; False: there is none, or it is the last."""
        sequence, drafts = chain.want.sequence, tuple(chain.tokens)
        row = self._widen(logits, sequence.request.vocab_size or self._bounds.vocab_size)
        masked = sequence.request.grammar is not None
        if masked:
            if self._mask is None or not self._mask(sequence, drafts, row):
                return False
            logits = self._narrow(row)
        total = _log_sum(logits, sequence.request.params.temperature)
        if total is None:  # what the grammar allows is not among the head's tokens
            return False
        token = self._choose(sequence, drafts, row, masked=masked)
        if token is None:
            return False
        chain.tokens.append(token)
        score = float(logits[self._places[token]])
        chain.chances.append(_chance(score, total, sequence.request.params.temperature))
        return self._goes_on(chain, token)

    def _widen(self, logits: Floats, width: int) -> Floats:
        """A row of the sequence's vocabulary: tokens that the head lacks cannot be had."""
        row = np.full(width, -np.inf, np.float32)
        row[self._ids] = logits
        return row

    def _narrow(self, row: Floats) -> Floats:
        """A copy of what a row says of the head's own tokens."""
        narrow: Floats = row[self._ids].copy()
        return narrow

    def _goes_on(self, chain: _Chain, token: int) -> bool:
        want, num = chain.want, chain.num_drafted
        if num >= want.limit + want.extra or token >= self._bounds.vocab_size:
            return False
        if ends(chain.want.sequence, token, self._bounds.eos_token_ids):
            return False
        if num >= want.limit and math.prod(chain.chances) < want.floor:
            return False
        return self._has_room(chain)

    def _has_room(self, chain: _Chain) -> bool:
        """Whether there is a slot for one row more."""
        return len(chain.table) * self._bounds.block_size >= chain.start + len(chain.tokens)


def _behind(span: Span, new: SequenceOf[int]) -> list[int]:
    """The tokens behind a span's rows, as far as they were verified: `new` is what it gave."""
    tokens, first = span.sequence.tokens, span.start + 1
    known = tokens[first : first + span.num_tokens]
    return [*known, *new[: span.num_tokens - len(known)]]


def _tables(chains: SequenceOf[_Chain]) -> np.ndarray:
    tables = np.zeros((len(chains), max(len(c.table) for c in chains)), np.int32)
    for row, chain in zip(tables, chains, strict=True):
        row[: len(chain.table)] = chain.table
    return tables


def _draft(chain: _Chain) -> Draft | None:
    if chain.num_drafted < 1:
        return None
    tokens = tuple(chain.tokens[len(chain.want.after) :])
    return Draft(tokens=tokens, source=SOURCE, chances=tuple(chain.chances))


def _log_sum(logits: Floats, temperature: float) -> float | None:
    """Logarithm of the sum of a row's exponentials; None where the row has no token."""
    scores = logits / max(temperature, MIN_TEMPERATURE) if temperature > 0 else logits
    largest = float(scores.max())
    if not math.isfinite(largest):
        return None
    return largest + math.log(float(np.exp(scores - largest).sum()))


def _chance(score: float, total: float, temperature: float) -> float:
    """The head's own probability of a token, from its logit."""
    if temperature > 0:
        score /= max(temperature, MIN_TEMPERATURE)
    return math.exp(score - total)
