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
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.speculative.eagle_blocks import HeadBlocks, HeadState
from plait.speculative.eagle_choice import HeadChoice
from plait.speculative.eagle_head import EagleHead
from plait.speculative.eagle_program import Followed
from plait.speculative.eagle_round import Chain, HeadRounds
from plait.speculative.source import MAX_FAULTS, Draft, Round, Want

if TYPE_CHECKING:
    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence, Span, StepPlan, StepResult
    from plait.speculative.choice import Choose, Mask

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
        self._follows = follows
        self._blocks = HeadBlocks(
            block_size=bounds.block_size,
            group=bounds.group,
            num_blocks=bounds.num_blocks,
            num_scratch=bounds.num_scratch,
        )
        ids = head.target_ids
        self._choice = HeadChoice(
            np.arange(head.config.draft_vocab_size) if ids is None else ids.numpy(),
            bounds.vocab_size,
            choose=choose,
            mask=mask,
        )
        self._rounds = HeadRounds(
            head,
            self._blocks,
            self._choice,
            takes_likeliest,
            eos_token_ids=bounds.eos_token_ids,
        )
        self._num_rounds = self._num_ingested_rows = self._num_faults = 0
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
            "rounds": self._num_rounds,
            "forwards": self._rounds.num_forwards,
            "rows": self._rounds.num_rows,
            "ingested_rows": self._num_ingested_rows,
            "faults": self._num_faults,
            "seconds": self._seconds,
            "ingest_seconds": self._ingest_seconds,
            "sequences": self._blocks.num_followed,
            "unseen_sequences": self._blocks.num_unseen,
        }

    def knows_first(self, sequence: Sequence) -> bool:
        """See `TappedSource.knows_first`."""
        state = self._blocks.ready(sequence)
        return state is not None and state.first is not None and self._rounds.is_plain(sequence)

    def takes(self, sequence: Sequence) -> bool:
        """See `ModelSource.takes`: whether it has seen all of the sequence up to now."""
        is_ready = self._blocks.ready(sequence) is not None
        return is_ready and not self.is_off and self._choice.can_obey(sequence)

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
            states[s].num_unasked < ASKED_AGAIN and self._rounds.is_plain(plan.spans[s].sequence)
            for s, _ in taken
        )
        ahead = self.head.follow(self._rows(plan.spans, batch, taps, taken, drafts=drafts))
        for at, (s, behind) in enumerate(taken):
            state = states[s]
            state.hidden = ahead.hidden[at]
            state.first = ahead.next[at] if ahead.next and ahead.next[at][0] >= 0 else None
            state.num_unasked += 1
            self._blocks.seen(state, plan.spans[s], len(behind), result.spans[s].token_ids)
            self._num_ingested_rows += len(behind)

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
        chains: list[Chain | None] = [None] * len(wants)
        try:
            chains = self._rounds.draft(wants)
        except Exception:
            log.exception("the draft head failed with %d sequences", len(wants))
            self._count_fault(want.sequence for want in wants)
        drafts = [None if chain is None else _draft(chain) for chain in chains]
        if any(drafts):
            self._faults_in_a_row = 0
        seconds = time.perf_counter() - began
        self._seconds += seconds
        self._num_rounds += 1
        depths = [chain.num_chosen for chain in chains if chain is not None and chain.num_drafted]
        self.last = Round(
            seconds=seconds, num_forwards=max(depths, default=0), num_rows=sum(depths)
        )
        return drafts

    def _count_fault(self, sequences: Iterable[Sequence]) -> None:
        self._num_faults += 1
        self._faults_in_a_row += 1
        for sequence in sequences:
            self._blocks.lose(sequence)
        if self.is_off:
            log.error("the draft head failed %d times in a row: it is left alone", MAX_FAULTS)


def _behind(span: Span, new: SequenceOf[int]) -> list[int]:
    """The tokens behind a span's rows, as far as they were verified: `new` is what it gave."""
    tokens, first = span.sequence.tokens, span.start + 1
    known = tokens[first : first + span.num_tokens]
    return [*known, *new[: span.num_tokens - len(known)]]


def _draft(chain: Chain) -> Draft | None:
    if chain.num_drafted < 1:
        return None
    tokens = tuple(chain.tokens[len(chain.want.after) :])
    return Draft(tokens=tokens, source=SOURCE, chances=tuple(chain.chances))
