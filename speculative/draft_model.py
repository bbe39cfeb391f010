"""Drafts by a smaller model with the target's tokens.

A round drafts for many sequences at once, one forward pass of the draft model per depth:

    depth 0    what each sequence has that the draft model has not seen: the last token, tokens
               that other sources put in between, or a chunk of a longer stretch (catching up)
    depth i    the i-th draft of each sequence that goes on

Each draft is chosen as the target will choose: with the request's own temperature, penalties,
bans and grammar, and with the noise of that position (coupled sampling). Verification never looks
at the draft's probabilities, so this may share the noise, and a draft model that equals the target
is always right. Nothing here can change a text; what fails here costs drafts, never a request.

Where rejection sampling verifies (`rejection`), drafts have noise of their own, and what each was
drawn from goes along. How many are drawn must not depend on them, so `floor` does not end these.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from plait.platform.batch import build
from plait.platform.core import Span, StepPlan
from plait.speculative.choice import MAX_LOGIT_ROWS, MIN_TEMPERATURE, Floats, ends
from plait.speculative.draft_blocks import DraftBlocks, DraftState
from plait.speculative.rejection import Distribution, is_drawn
from plait.speculative.source import MAX_FAULTS, Draft, Round, Want

if TYPE_CHECKING:
    from plait.platform.core import Sequence
    from plait.platform.executor import Executor
    from plait.speculative.choice import Choose, Draw, Mask

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBounds:
    """What the draft model has to keep to."""

    block_size: int
    group: int  # of the target, under whose block numbers the pages lie
    num_blocks: int  # of that group
    num_scratch: int  # blocks behind them
    vocab_size: int  # of the target
    eos_token_ids: tuple[int, ...]  # of the target
    max_rows: int  # tokens that a round computes to catch up


@dataclass(slots=True, kw_only=True)
class _Work:
    """One sequence in a round."""

    want: Want
    state: DraftState
    table: list[int]  # its own blocks, then scratch
    drafts: list[int]  # those of others, then ours
    start: int  # the next forward computes positions start … end - 1
    end: int = 0
    chances: list[float] = field(default_factory=list)
    probs: list[Distribution] = field(default_factory=list)  # in place of chances, where drawn

    @property
    def length(self) -> int:
        """Tokens up to the last draft."""
        return len(self.want.sequence.tokens) + len(self.drafts)

    @property
    def num_drafted(self) -> int:
        """Drafts of ours."""
        return len(self.drafts) - len(self.want.after)


class DraftModel:
    """Implements `source.ModelSource`. Belongs to the engine's thread.

    `executor` is the draft model's; its pages are allocated. `mask` may be missing as long as
    nobody asks for drafts of a sequence with a grammar. With `draw`, drafts are for rejection
    sampling wherever a request allows it.
    """

    name = "model"

    def __init__(
        self,
        executor: Executor,
        bounds: DraftBounds,
        *,
        choose: Choose,
        mask: Mask | None = None,
        draw: Draw | None = None,
    ) -> None:
        self.model = executor.model
        self.last = Round()
        self.floor = 0.0  # chance that all of a draft so far holds, below which it ends
        self._executor = executor
        self._bounds = bounds
        self._choose = choose
        self._mask = mask
        self._draw = draw
        self._num_groups = len(executor.kv_groups)
        self._blocks = DraftBlocks(
            block_size=bounds.block_size,
            group=bounds.group,
            num_blocks=bounds.num_blocks,
            num_scratch=bounds.num_scratch,
        )
        self._counts = {"rounds": 0, "forwards": 0, "rows": 0, "catch_up_rows": 0, "faults": 0}
        self._seconds = 0.0
        self._faults_in_a_row = 0

    # --- what the engine asks --------------------------------------------------------------------

    @property
    def is_off(self) -> bool:
        """Whether it failed so often that it is left alone."""
        return self._faults_in_a_row >= MAX_FAULTS

    @property
    def figures(self) -> dict[str, float]:
        """Counters since the start."""
        return {**self._counts, "seconds": self._seconds}

    def takes(self, sequence: Sequence) -> bool:
        """See `ModelSource.takes`: whether it fits the context, and nothing is missing here."""
        if self._mask is None and sequence.request.grammar is not None:
            return False
        return not self.is_off and len(sequence.tokens) <= self.model.context_length

    def lag(self, sequence: Sequence) -> int:
        """See `ModelSource.lag`. A round computes at most `DraftBounds.max_rows` of all lags."""
        return max(0, self._blocks.follow(sequence).num_missing - 1)

    def release(self, sequence: Sequence) -> None:
        """See `ModelSource.release`."""
        self._blocks.release(sequence)

    def check_integrity(self, sequences: SequenceOf[Sequence]) -> None:
        """Raise AssertionError unless all that is kept belongs to `sequences`, the unfinished."""
        self._blocks.check_integrity(sequences)

    def propose(self, wants: SequenceOf[Want]) -> list[Draft | None]:
        """See `ModelSource.propose`. None for a sequence that lags, is too long or has no draft.

        A fault ends the round without drafts; after some in a row there are none any more.
        """
        self.last = Round()
        if self.is_off or not wants:
            return [None] * len(wants)
        began = time.perf_counter()
        forwards, rows, catch_up = (
            self._counts[name] for name in ("forwards", "rows", "catch_up_rows")
        )
        try:
            drafts = self._round(wants)
            self._faults_in_a_row = 0
        except Exception:
            log.exception("the draft model failed with %d sequences", len(wants))
            drafts = [None] * len(wants)
            self._count_fault(wants)
        seconds = time.perf_counter() - began
        self._seconds += seconds
        self._counts["rounds"] += 1
        self.last = Round(
            seconds=seconds,
            num_forwards=self._counts["forwards"] - forwards,
            num_rows=self._counts["rows"] - rows,
            num_catch_up_rows=self._counts["catch_up_rows"] - catch_up,
        )
        return drafts

    def _count_fault(self, wants: SequenceOf[Want]) -> None:
        self._counts["faults"] += 1
        self._faults_in_a_row += 1
        for want in wants:
            self._blocks.forget(want.sequence)
        if self.is_off:
            log.error("the draft model failed %d times in a row: it is left alone", MAX_FAULTS)

    # --- a round ---------------------------------------------------------------------------------

    def _round(self, wants: SequenceOf[Want]) -> list[Draft | None]:
        self._blocks.begin()
        works = [self._open(want) for want in wants]
        going = self._first([work for work in works if work is not None])
        while going:
            going = self._forward(going)
        return [None if work is None else _draft(work) for work in works]

    def _open(self, want: Want) -> _Work | None:
        length = len(want.sequence.tokens) + len(want.after)
        if want.limit < 1 or length > self.model.context_length:
            return None
        state = self._blocks.follow(want.sequence)
        num_held = 0
        for token, ahead in zip(want.after, state.ahead, strict=False):
            if token != ahead:
                break
            num_held += 1
        return _Work(
            want=want,
            state=state,
            table=list(self._blocks.table(want.sequence)),
            drafts=list(want.after),
            # The last row is always computed: its hidden state is what is wanted.
            start=min(state.num_computed + num_held, length - 1),
        )

    def _first(self, works: list[_Work]) -> list[_Work]:
        """What depth 0 computes: all that is missing, least first, within the bound.

        Of what remains of the bound, those that lag further get a chunk, in the same order.
        """
        left = self._bounds.max_rows
        going: list[_Work] = []
        for work in sorted(works, key=lambda work: work.length - work.start):
            missing = work.length - work.start - 1  # beside the last row
            work.end = work.length if missing <= left else work.start + left
            left -= min(missing, left)
            known = len(work.want.sequence.tokens)
            catch_up = max(0, min(work.end, known - 1) - work.start)
            if work.end > work.start and self._cover(work):
                self._counts["catch_up_rows"] += catch_up
                going.append(work)
        return going

    def _cover(self, work: _Work) -> bool:
        """Have blocks for all positions that are computed next."""
        while len(work.table) * self._bounds.block_size < work.end:
            block = self._blocks.take_scratch()
            if block is None:
                return False
            work.table.append(block)
        return True

    def _forward(self, works: list[_Work]) -> list[_Work]:
        """Compute one depth, and choose; returns those that go on."""
        for work in works:
            self._blocks.will_write(work.state, work.start, work.end)
        hidden_rows = np.cumsum([work.end - work.start for work in works]) - 1
        plan = StepPlan(step_id=0, spans=tuple(map(self._span, works)))
        batch = build(plan, self._block_size, images=False)  # it reads text alone
        # Tokens that adapters of the target add, and placeholders, have no row here.
        batch.token_ids[batch.token_ids >= self.model.vocab_size] = 0
        hidden = self._executor.forward(batch)
        self._counts["forwards"] += 1
        self._counts["rows"] += len(batch.token_ids)
        for work in works:
            self._blocks.wrote(work.state, work.end, work.drafts)
        complete = [i for i, work in enumerate(works) if work.end == work.length]
        going = []
        for begin in range(0, len(complete), MAX_LOGIT_ROWS):
            chosen = complete[begin : begin + MAX_LOGIT_ROWS]
            logits: Floats = self._executor.logits(hidden, hidden_rows[chosen]).cpu().numpy()
            going += [
                works[i]
                for i, row in zip(chosen, logits, strict=True)
                if self._extend(works[i], row)
            ]
        return going

    @property
    def _block_size(self) -> int:
        return self._bounds.block_size

    def _span(self, work: _Work) -> Span:
        first_draft = len(work.want.sequence.tokens)
        drafts = work.drafts[max(0, work.start - first_draft) : max(0, work.end - first_draft)]
        table = tuple(work.table[: -(-work.end // self._block_size)])
        return Span(
            sequence=work.state.view,
            start=work.start,
            num_tokens=work.end - work.start,
            num_samples=0,
            drafts=tuple(drafts),
            block_ids=(table,) * self._num_groups,
        )

    # --- choosing --------------------------------------------------------------------------------

    def _extend(self, work: _Work, logits: Floats) -> bool:
        """Choose the next draft of a sequence; False: there is none, or it is the last."""
        sequence = work.want.sequence
        row = self._fit(logits, sequence.request.vocab_size or self._bounds.vocab_size)
        drafts = tuple(work.drafts)
        if self._draw is not None and is_drawn(sequence.request) and not work.want.after:
            drawn = self._draw(sequence, drafts, row)
            if drawn is None:
                return False
            work.drafts.append(drawn[0])
            work.probs.append(drawn[1])
            return self._goes_on(work, drawn[0])
        masked = sequence.request.grammar is not None
        if masked and (self._mask is None or not self._mask(sequence, drafts, row)):
            return False
        token = self._choose(sequence, drafts, row, masked=masked)
        if token is None:
            return False
        work.drafts.append(token)
        work.chances.append(_chance(row, token, sequence.request.params.temperature))
        return self._goes_on(work, token)

    def _fit(self, logits: Floats, width: int) -> Floats:
        """A row as wide as the sequence's vocabulary: neither pads nor what we lack can be had."""
        if len(logits) >= width:
            return logits[:width]
        row = np.full(width, -np.inf, np.float32)
        row[: len(logits)] = logits
        return row

    def _goes_on(self, work: _Work, token: int) -> bool:
        if work.num_drafted >= work.want.limit:
            return False
        if ends(work.want.sequence, token, self._bounds.eos_token_ids):
            return False
        if math.prod(work.chances) < self.floor or work.length > self.model.context_length:
            return False
        work.start, work.end = work.end, work.length
        return self._cover(work)


def _draft(work: _Work) -> Draft | None:
    if not work.num_drafted:
        return None
    return Draft(
        tokens=tuple(work.drafts[len(work.want.after) :]),
        source=DraftModel.name,
        chances=tuple(work.chances),
        probs=tuple(work.probs),
    )


def _chance(row: Floats, token: int, temperature: float) -> float:
    """The draft model's own probability of a token: before penalties, behind the grammar."""
    import torch

    scores = torch.from_numpy(row)
    if temperature > 0:
        scores = scores / max(temperature, MIN_TEMPERATURE)
    return float(scores.softmax(-1)[token])
