"""Which drafts the sequences of a step get: the one place where all sources meet.

    1  candidates     text that the grammar forces; behind it what the text itself, or recent
                      answers, suggest; or what the draft model says, where that promises more
    2  legal          cut where the grammar forbids, so that no such token becomes a row
    3  worth it       over the whole batch, those that make tokens come fastest (`economy`)

Drafts are guesses that the common step verifies: nothing here can change a token. What fails here
costs drafts, and never a request.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from plait.platform.core import SequenceState
from plait.platform.strand import Strand
from plait.speculative.acceptance import Whose
from plait.speculative.budget import Load
from plait.speculative.cost import StepCost
from plait.speculative.economy import Economy, Offer, split
from plait.speculative.following import Following
from plait.speculative.source import Draft, Want
from plait.speculative.tally import (
    AT_ITS_END,
    BY_REQUEST,
    FAULT,
    FORBIDDEN,
    NO_ROOM,
    NOT_WORTH_IT,
    NOTHING_FOUND,
    Tally,
)

if TYPE_CHECKING:
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence, StepPlan, StepResult
    from plait.speculative.source import ModelSource, TappedSource, TextSource

log = logging.getLogger(__name__)

FORCED = "grammar"
MAX_FAULTS = 3  # in a row, until nothing is drafted any more


class Constraints(Protocol):
    """What grammars say of drafts. Implemented by `structured.strand.GrammarStrand`."""

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        """Tokens of the text that must follow, at most `limit`."""
        ...

    def count_legal(self, sequence: Sequence, drafts: SequenceOf[int]) -> int:
        """How many of `drafts` may follow, one behind the other."""
        ...


@dataclass(frozen=True, slots=True)
class _Rival:
    """What the draft model may be asked, and what it competes with."""

    place: int  # among all that want drafts
    want: Want
    forced: tuple[Draft, ...]
    text: tuple[Draft, ...]  # behind what is forced


@dataclass(slots=True)
class _State:
    """What is known of one sequence until it ends."""

    whose: Whose
    offer: Offer | None = None  # what its drafts were taken from
    is_followed: bool | None = None  # by the head; None: not asked yet
    accepting: deque[str] = field(default_factory=deque)  # sources of drafts that hold


class Speculator(Strand):
    """Implements `platform.drafting.Drafter`. It is a strand too, so as to see what comes of it.

    `texts` are asked in turn for what follows; the longest that promises most wins.
    """

    def __init__(  # noqa: PLR0913 (its sources, each of which may be missing)
        self,
        economy: Economy,
        *,
        max_tokens: int,
        vocab_size: int,
        constraints: Constraints | None = None,
        texts: SequenceOf[TextSource] = (),
        model: ModelSource | None = None,
        head: TappedSource | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._economy = economy
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._constraints = constraints
        self._texts = tuple(texts)
        self._model = model or head
        self._head = head
        self._following = Following()
        self._ingest_s = 0.0  # in this step
        self._gained_s = 0.0  # by drafts of the head, until the last step
        self._num_judged = 0
        self._model_cost = StepCost()
        self._clock = clock
        self._states: dict[int, _State] = {}
        self._prompt_rows = 0  # of the last plan
        self._calibration: deque[int] = deque()  # drafts that the next steps are to verify
        self._is_calibrating = False
        self._faults_in_a_row = 0
        self._tally = Tally()

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
            length = min(self._calibration.popleft(), room // len(sequences))
            for sequence in sequences:
                sequence.drafts[:] = [0] * length
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
        chains = [self._text(want) for want in wants]
        if self._model is not None:
            self._ask_model(self._model, wants, chains)
        offers: list[tuple[Sequence, Offer]] = []
        for want, chain in zip(wants, chains, strict=True):
            legal = self._legal(want.sequence, chain)
            if not legal:
                self._tally.undrafted(FORBIDDEN if chain else NOTHING_FOUND)
            else:
                state = self._state(want.sequence)
                state.offer = Offer(whose=state.whose, drafts=legal)
                offers.append((want.sequence, state.offer))
        counts = self._economy.choose([offer for _, offer in offers], max_rows=room)
        for (sequence, offer), count in zip(offers, counts, strict=True):
            tokens = [token for draft in offer.drafts for token in draft.tokens]
            sequence.drafts[:] = tokens[:count]
            self._tally.cut(offer.drafts, count, by=NOT_WORTH_IT)
            if not count:
                self._tally.undrafted(NOT_WORTH_IT)

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

    def _text(self, want: Want) -> tuple[Draft, ...]:
        """Forced text, and what other text suggests behind it."""
        forced: tuple[int, ...] = ()
        if self._constraints is not None and want.sequence.request.grammar is not None:
            began = self._clock()
            forced = tuple(self._constraints.forced(want.sequence, want.limit))
            self._tally.drafting(FORCED, self._clock() - began)
        chain = (Draft(tokens=forced, source=FORCED),) if forced else ()
        rest = replace(want, after=forced, limit=want.limit - len(forced))
        if rest.limit <= 0:
            return chain
        found = [d for d in (self._ask_text(text, rest) for text in self._texts) if d is not None]
        if not found:
            return chain
        return (*chain, max(found, key=lambda draft: self._promise(want.sequence, (draft,))))

    def _ask_text(self, text: TextSource, want: Want) -> Draft | None:
        began = self._clock()
        draft = text.propose(want)
        self._tally.drafting(text.name, self._clock() - began)
        return draft

    def _promise(self, sequence: Sequence, chain: tuple[Draft, ...]) -> float:
        """Tokens that drafts are expected to bring."""
        whose = self._state(sequence).whose
        promised, reached = 0.0, 1.0
        for draft in chain:
            survival = self._economy.acceptance.survival(whose, draft)
            promised += reached * sum(survival)
            reached *= survival[-1]
        return promised

    def _ask_model(
        self, model: ModelSource, wants: SequenceOf[Want], chains: list[tuple[Draft, ...]]
    ) -> None:
        """Replace what stands behind forced text in `chains` where the model promises more."""
        rivals: list[_Rival] = []
        for place, (want, chain) in enumerate(zip(wants, chains, strict=True)):
            rival = self._rival(model, place, want, chain)
            if rival is not None:
                rivals.append(rival)
        lag = sum(model.lag(rival.want.sequence) for rival in rivals)
        depths = self._economy.depths(
            model.name,
            [(self._state(rival.want.sequence).whose, rival.want.limit) for rival in rivals],
            self._model_cost.seconds,
            start_seconds=self._model_cost.seconds(lag) if lag else 0.0,
        )
        asked = [
            replace(rival, want=replace(rival.want, limit=depth))
            for rival, depth in zip(rivals, depths, strict=True)
            if depth
        ]
        if not asked:
            return
        drafts = model.propose([rival.want for rival in asked])
        self._economy.ledger.spend(model.name, model.last.seconds)
        self._tally.drafting(model.name, model.last.seconds)
        if model.last.num_forwards:
            num_rows = round(model.last.num_rows / model.last.num_forwards)
            self._model_cost.measured(num_rows, model.last.seconds / model.last.num_forwards)
        for rival, draft in zip(asked, drafts, strict=True):
            if draft is not None and draft.tokens:
                sequence = rival.want.sequence
                if self._promise(sequence, (draft,)) > self._promise(sequence, rival.text):
                    chains[rival.place] = (*rival.forced, draft)

    def _rival(
        self, model: ModelSource, place: int, want: Want, chain: tuple[Draft, ...]
    ) -> _Rival | None:
        """What the model could be asked in place of a chain; None where the chain promises more."""
        forced = chain[:1] if chain and chain[0].source == FORCED else ()
        after = forced[0].tokens if forced else ()
        rest = replace(want, after=after, limit=want.limit - len(after))
        if rest.limit <= 0 or not model.takes(want.sequence):
            return None
        text = chain[len(forced) :]
        whose = self._state(want.sequence).whose
        expected = self._economy.acceptance.expected(whose, model.name, rest.limit)
        if sum(expected) <= self._promise(want.sequence, text):
            return None
        return _Rival(place, rest, forced, text)

    def _legal(self, sequence: Sequence, chain: tuple[Draft, ...]) -> tuple[Draft, ...]:
        """Cut where the vocabulary or the grammar has no such token."""
        tokens = [token for draft in chain for token in draft.tokens]
        width = sequence.request.vocab_size or self._vocab_size
        num_legal = next((i for i, t in enumerate(tokens) if not 0 <= t < width), len(tokens))
        if self._constraints is not None and sequence.request.grammar is not None:
            num_legal = self._constraints.count_legal(sequence, tokens[:num_legal])
        if num_legal == len(tokens):
            return chain
        self._tally.cut(chain, num_legal, by=FORBIDDEN)
        return tuple(
            replace(draft, tokens=draft.tokens[:num], chances=draft.chances[:num])
            for draft, num in split(chain, num_legal)
        )

    def _state(self, sequence: Sequence) -> _State:
        state = self._states.get(sequence.seq_id)
        if state is None:
            request = sequence.request
            whose = Whose(
                sequence=sequence.seq_id,
                generation="+".join(use.generation for use in request.adapters),
                grammar="" if request.grammar is None else "constrained",
            )
            state = self._states[sequence.seq_id] = _State(whose)
        return state

    # --- while it is computed ---

    def follows(self, sequence: Sequence) -> bool:
        """Whether the head shall go along with a sequence; not where nobody wants drafts."""
        said = sequence.request.speculation
        if not said.enabled or said.max_tokens == 0:
            return False
        state = self._state(sequence)
        if state.is_followed is None:
            state.is_followed = self._following.takes_on
        elif not self._following.stays:
            state.is_followed = False  # for good: the head would lack what it did not see
        return state.is_followed

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """See `Drafter.taps`."""
        if self._head is None or not self._head.wants_taps(plan):
            return ()
        return self._head.taps

    def ingest(
        self, plan: StepPlan, batch: StepBatch, taps: torch.Tensor | None, result: StepResult
    ) -> None:
        """See `Drafter.ingest`."""
        if self._head is not None:
            self._ingest_s += self._head.ingest(plan, batch, taps, result)

    # --- after it ---

    def computed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """See `Drafter.computed`: learn how drafts fared, and what the step cost."""
        if self._is_calibrating:
            self._economy.cost.measured(plan.num_rows, seconds - self._ingest_s)
            self._ingest_s = 0.0
            return
        for span, outcome in zip(plan.spans, result.spans, strict=True):
            state = self._states.get(span.sequence.seq_id)
            if state is None or state.offer is None:
                continue
            num_verified, num_sampled = len(span.drafts), len(outcome.token_ids)
            if num_verified and num_sampled:
                # Each sampled token judges the draft in its place; all drafts may hold.
                num_seen = min(num_sampled, num_verified)
                self._economy.verified(state.offer, num_verified, num_sampled - 1, num_seen)
                drafts = split(state.offer.drafts, num_verified)
                sources = [draft.source for draft, num in drafts for _ in range(num)]
                self._tally.verified(span.sequence, sources, num_sampled - 1)
                state.accepting = deque(sources[: num_sampled - 1])
            state.offer = None
        load = _load_of(plan)
        self._prompt_rows = load.num_prompt_rows
        if load.num_decoding:
            self._tally.stepped(sum(len(span.drafts) for span in plan.spans))
        self._economy.end(load, plan.num_rows, seconds - self._ingest_s)
        if self._head is not None:
            self._judge_head(self._head.name, seconds)

    def _judge_head(self, name: str, seconds: float) -> None:
        cost_s, earned_s = self._economy.ledger.report().get(name, (0.0, 0.0))
        judged = self._tally.num_verified(name)
        self._tally.following(name, self._ingest_s)
        self._following.step(
            seconds - self._ingest_s,
            cost_s=self._ingest_s,
            gain_s=earned_s - cost_s - self._gained_s,
            num_judged=judged - self._num_judged,
        )
        self._gained_s, self._num_judged, self._ingest_s = earned_s - cost_s, judged, 0.0

    def forget(self, generation: str) -> None:
        """See `Drafter.forget`."""
        self._economy.forget(generation)
        for text in self._texts:
            text.forget(generation)

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
        for text in self._texts:
            text.release(sequence)
        if self._model is not None:
            self._model.release(sequence)
        self._economy.release(sequence.seq_id)
        self._states.pop(sequence.seq_id, None)

    @property
    def busy(self) -> bool:
        """See `Strand.busy`: nobody waits for drafts."""
        return False

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """See `Strand.check_integrity`: nothing is kept of a sequence that has ended."""
        del running

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
