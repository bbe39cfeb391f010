"""Which drafts the sequences of a step get: the one place where all sources meet.

    1  candidates     what may follow each, from all sources (`candidates`)
    2  worth it       over the whole batch, those that make tokens come fastest (`economy`)
    3  what came      of each, and what the step cost: learned for the next ones

Drafts are guesses that the common step verifies: nothing here can change a token. What fails here
costs drafts, and never a request.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plait.platform.core import SequenceState
from plait.platform.strand import Strand
from plait.speculative.acceptance import Whose
from plait.speculative.budget import Load
from plait.speculative.candidates import Candidates
from plait.speculative.economy import Economy, Offer, split
from plait.speculative.model_drafts import ModelDrafts
from plait.speculative.source import Want
from plait.speculative.tally import (
    AT_ITS_END,
    BY_REQUEST,
    FAULT,
    NO_ROOM,
    NOT_WORTH_IT,
    Tally,
)

if TYPE_CHECKING:
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence, StepPlan, StepResult
    from plait.speculative.source import Sources

log = logging.getLogger(__name__)

CALIBRATED_DEPTH = 2  # of what a model drafts so as to learn what it costs
MAX_FAULTS = 3  # in a row, until nothing is drafted any more


@dataclass(slots=True)
class _State:
    """What is known of one sequence until it ends."""

    sequence: Sequence
    whose: Whose
    offer: Offer | None = None  # what its drafts were taken from
    accepting: deque[str] = field(default_factory=deque)  # sources of drafts that hold


class Speculator(Strand):
    """Implements `platform.drafting.Drafter`. It is a strand too, so as to see what comes of it.

    `draws`: the model's drafts may be for rejection sampling. How many of these are verified is
    settled before any is drawn.
    """

    def __init__(
        self,
        economy: Economy,
        sources: Sources,
        *,
        max_tokens: int,
        vocab_size: int,
        draws: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._economy = economy
        self._max_tokens = max_tokens
        self._draws = draws
        self._clock = clock
        self._tally = Tally()
        source = sources.model or sources.head
        self._model = (
            None if source is None else ModelDrafts(source, economy, self._tally, head=sources.head)
        )
        self._candidates = Candidates(
            sources, self._model, economy, self._tally, vocab_size=vocab_size, clock=clock
        )
        self._states: dict[int, _State] = {}
        self._ingest_s = 0.0  # in this step, by a head
        self._prompt_rows = 0  # of the last plan
        self._calibration: deque[int] = deque()  # drafts that the next steps are to verify
        self._is_calibrating = False
        self._faults_in_a_row = 0

    # --- before a plan ---

    def draft(self, sequences: SequenceOf[Sequence], room: int) -> None:
        """See `Drafter.draft`."""
        if not sequences:
            return
        if self._faults_in_a_row >= MAX_FAULTS:
            self._tally.undrafted(FAULT, len(sequences))
            return
        self._is_calibrating = bool(self._calibration)
        if self._is_calibrating:
            self._fill(sequences, min(self._calibration.popleft(), room // len(sequences)))
            return
        began = self._clock()
        try:
            self._economy.begin(self._load(sequences))
            self._draft(sequences, room)
            self._faults_in_a_row = 0
        except Exception:
            self._faults_in_a_row += 1
            off = ": nothing is drafted any more" * (self._faults_in_a_row == MAX_FAULTS)
            log.exception("drafting failed%s", off)
            self._tally.undrafted(FAULT, len(sequences))
            for sequence in sequences:
                sequence.drafts.clear()
        self._tally.choosing(self._clock() - began)

    def _fill(self, sequences: SequenceOf[Sequence], length: int) -> None:
        """Have the step verify so many tokens each, whatever they are, to learn what it costs."""
        for sequence in sequences:
            if self._model is not None:
                self._model.calibrate(Want(sequence=sequence, limit=CALIBRATED_DEPTH))
            sequence.drafts[:] = [0] * length
            sequence.draft_probs.clear()

    def _load(self, sequences: SequenceOf[Sequence]) -> Load:
        return Load(
            num_decoding=len(sequences),
            num_prompt_rows=self._prompt_rows,
            adapters=any(s.request.adapters for s in sequences),
            masks=any(s.request.grammar is not None for s in sequences),
        )

    def _draft(self, sequences: SequenceOf[Sequence], room: int) -> None:
        wants = [w for w in map(self._want, sequences) if w.limit > 0]
        if room <= 0:
            self._tally.undrafted(NO_ROOM, len(wants))
            return
        if not wants:
            return
        states = [self._state(want.sequence) for want in wants]
        chains = self._candidates.of(
            wants, [state.whose for state in states], max_drawn=room if self._draws else None
        )
        offers: list[tuple[Sequence, Offer]] = []
        for state, chain in zip(states, chains, strict=True):
            if chain:
                state.offer = Offer(whose=state.whose, drafts=chain)
                offers.append((state.sequence, state.offer))
        counts = self._choose([offer for _, offer in offers], room)
        for (sequence, offer), count in zip(offers, counts, strict=True):
            tokens = [token for draft in offer.drafts for token in draft.tokens]
            sequence.drafts[:] = tokens[:count]
            if self._draws:
                sequence.draft_probs[:] = offer.drafts[0].probs[:count]
            self._tally.cut(offer.drafts, count, by=NOT_WORTH_IT)
            if not count:
                self._tally.undrafted(NOT_WORTH_IT)

    def _choose(self, offers: SequenceOf[Offer], room: int) -> list[int]:
        """How many tokens of each offer to verify: all of what was drawn, else what is worth it."""
        drawn = [offer.num_tokens if offer.drafts[0].probs else 0 for offer in offers]
        if not any(drawn):
            return self._economy.choose(offers, max_rows=room)
        others = [o for o, num in zip(offers, drawn, strict=True) if not num]
        chosen = iter(self._economy.choose(others, max_rows=room - sum(drawn)))
        return [num or next(chosen) for num in drawn]

    def _want(self, sequence: Sequence) -> Want:
        """How many drafts could be of use: all may hold, and one token more comes with them."""
        said = sequence.request.speculation
        limit = min(self._max_tokens, sequence.max_total_tokens - len(sequence.tokens) - 1)
        if limit <= 0:
            self._tally.undrafted(AT_ITS_END)
        elif not said.enabled or said.max_tokens == 0:
            self._tally.undrafted(BY_REQUEST)
            limit = 0
        elif said.max_tokens is not None:
            limit = min(limit, said.max_tokens)
        return Want(sequence=sequence, limit=limit)

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.seq_id)
        if state is None:
            request = sequence.request
            whose = Whose(
                sequence=sequence.seq_id,
                generation="+".join(use.generation for use in request.adapters),
                grammar="" if request.grammar is None else "constrained",
            )
            state = self._states[sequence.seq_id] = _State(sequence, whose)
        return state

    # --- while it is computed ---

    def follows(self, sequence: Sequence) -> bool:
        """Whether a head shall go along with a sequence."""
        return self._model is not None and self._model.follows(sequence)

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """See `Drafter.taps`."""
        return () if self._model is None else self._model.taps(plan)

    def ingest(
        self, plan: StepPlan, batch: StepBatch, taps: torch.Tensor | None, result: StepResult
    ) -> None:
        """See `Drafter.ingest`."""
        if self._model is not None:
            self._ingest_s += self._model.ingest(plan, batch, taps, result)

    # --- after it ---

    def computed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """See `Drafter.computed`: learn how drafts fared, and what the step cost."""
        seconds -= self._ingest_s
        self._ingest_s = 0.0
        if self._is_calibrating:
            self._economy.cost.measured(plan.num_rows, seconds)
            return
        for span, outcome in zip(plan.spans, result.spans, strict=True):
            state = self._states.get(span.sequence.seq_id)
            if state is not None and state.offer is not None:
                self._judge(state, state.offer, len(span.drafts), len(outcome.token_ids))
                state.offer = None
        load = _load_of(plan)
        self._prompt_rows = load.num_prompt_rows
        if load.num_decoding:
            self._tally.stepped(sum(len(span.drafts) for span in plan.spans))
        self._economy.end(load, plan.num_rows, seconds)
        if self._model is not None:
            self._model.settle(seconds)

    def _judge(self, state: _State, offer: Offer, num_verified: int, num_sampled: int) -> None:
        """Each sampled token judges the draft in its place; all drafts may hold."""
        if not num_verified or not num_sampled:
            return
        num_seen = min(num_sampled, num_verified)
        self._economy.verified(offer, num_verified, num_sampled - 1, num_seen)
        drafts = split(offer.drafts, num_verified)
        sources = [draft.source for draft, num in drafts for _ in range(num)]
        self._tally.verified(state.sequence, sources, num_sampled - 1)
        state.accepting = deque(sources[: num_sampled - 1])

    def forget(self, generation: str) -> None:
        """See `Drafter.forget`."""
        self._economy.forget(generation)
        self._candidates.forget(generation)

    def calibrate(self, lengths: SequenceOf[int]) -> None:
        """See `Drafter.calibrate`."""
        self._calibration.extend(lengths)

    # --- as a strand ---

    def admit(self, sequence: Sequence) -> bool:
        """See `Strand.admit`: nothing is reserved."""
        del sequence
        return True

    def commit(self, sequence: Sequence, token_id: int) -> bool:
        """See `Strand.commit`: a draft that holds counts once it is output."""
        del token_id
        state = self._states.get(sequence.seq_id)
        if state is not None and state.accepting:
            self._tally.output(sequence, state.accepting.popleft())
        return False

    def release(self, sequence: Sequence) -> None:
        """See `Strand.release`: what a sequence taught stays with those of its kind."""
        if sequence.state is not SequenceState.FINISHED:
            return
        self._candidates.release(sequence)
        self._economy.release(sequence.seq_id)
        self._states.pop(sequence.seq_id, None)

    @property
    def busy(self) -> bool:
        """See `Strand.busy`: nobody waits for drafts."""
        return False

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """See `Strand.check_integrity`: nothing is kept of a sequence that has ended."""
        del running
        for state in self._states.values():
            assert state.sequence.state is not SequenceState.FINISHED, "a state has leaked"

    @property
    def figures(self) -> Mapping[str, Any]:
        """See `Strand.figures`."""
        return {
            **self._tally.figures,
            "foreseen_over_taken": self._economy.foreseen_over_taken,
        }


def _load_of(plan: StepPlan) -> Load:
    """What a step computed beside drafts."""
    decoding = [span for span in plan.spans if span.num_tokens == 1 + len(span.drafts)]
    num_rows = sum(span.num_tokens - len(span.drafts) for span in plan.spans)
    return Load(
        num_decoding=len(decoding),
        num_prompt_rows=num_rows - len(decoding),
        adapters=any(span.sequence.request.adapters for span in plan.spans),
        masks=any(span.sequence.request.grammar is not None for span in plan.spans),
    )
