"""What each step computes: computed tokens chase known tokens within a budget.

May enter: the order in which sequences are served, admission, parking, what the result of a step
does to them. May not enter: torch, text, sampling, clocks of its own, or how any feature works.

There is no prefill and no decode. A sequence has known tokens (prompt and output), drafts to
verify, and a number of computed tokens; `plan` lets the last chase the others:

    1  running sequences that lack one token (and their drafts)     every one gets its row
    2  running sequences that lack more, in chunks                  by priority, then arrival
    3  waiting sequences for which all strands are ready, and all   by priority, then fair shares
       of whose known tokens get blocks                             (`fairness`)

A chunk ends before a span of `Request.spans`, or covers it whole, if need be beyond the budget: one
step at most is so much longer. It also ends before what a strand has no room for in this step
(`Strand.fit`), and so may be empty: then its sequence runs, and gets no row.

A sequence that a strand is not ready for is passed over, and all of its flow with it; one that
lacks blocks is not: nobody overtakes it. A waiting sequence comes before chunks of a strictly worse
priority, and may park sequences of it to get a place or blocks. What a strand refuses ends its
request.

Why everyone finishes. Say that something runs. Who needs a block takes it from parked sequences,
else from the running one of worst priority that has computed least, which then parks. So the
running sequence of best priority that has computed most is never parked to serve another of its
kind, and it fits alone, as `add` made sure: it goes on until it ends. Between equals nobody parks
another to be admitted. Where a strand lets it have no row, others that hold what it waits for have
theirs, until they need no more of it; and one that had to park instead lets go of it.

Say that nothing runs, and something waits. Either the first that is asked is ready: all others that
hold blocks are of no better priority, so it gets what it needs of theirs, and runs. Or it is passed
over. Those behind it may lack blocks that it holds, since they are of worse priority; then the plan
is empty, and they give back what they hold of strands. But nothing holds what a strand has against
the best of those that wait for it (`Strand.admit`), so that one becomes ready, and it is asked
before all that are of worse priority, and gets blocks of all others. Until then the strand is
`busy`, and whoever asked for the plan waits a moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import msgspec

from plait.platform.admission import check_request, sequence_seed
from plait.platform.choices import Choices, Chosen
from plait.platform.core import (
    FinishReason,
    Request,
    Sequence,
    SequenceState,
    Span,
    SpanResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from plait.platform.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    PlaitError,
)
from plait.platform.fairness import FairShares, WaitingSequences
from plait.platform.kv.manager import KVManager
from plait.platform.open_requests import OpenRequests
from plait.platform.ordering import OrderedSequences
from plait.platform.prompt_rows import PromptRows, contradiction
from plait.platform.strand import Strands
from plait.platform.unbroken import cut, least, longest

if TYPE_CHECKING:
    from plait.platform.config import CacheConfig, SchedulerConfig
    from plait.platform.kv.manager import Reservation
    from plait.platform.strand import Strand

Stop = Callable[[Sequence, int], tuple[FinishReason, int | str | None] | None]

# Flows that one step may pass over: asking is cheap, and the queue's bound is near it anyway.
MAX_PASSED_OVER = 256


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did to one sequence. It has ended if `sequence.finish_reason` is set."""

    sequence: Sequence
    token_ids: tuple[int, ...] = ()  # appended
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per appended token, if wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # the next ones; none is given twice
    error: tuple[str, str] | None = None  # (code, message)


class Scheduler:
    """Owns all sequences and their KV blocks. One plan is in flight at a time.

    A step is `plan`, the computing of it by others, and `commit`. `add` and `abort` may come at
    any point between calls.
    """

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, strands: SequenceOf[Strand] = ()
    ) -> None:
        self._config = config
        self._caching = cache.enable_prefix_caching
        self._kv = KVManager(
            cache, max_span=config.max_num_batched_tokens, watermark=config.watermark
        )
        # Each running sequence can get a row in each step.
        self._num_slots = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._strands = Strands(strands)
        self._requests = OpenRequests()
        self._shares = FairShares()
        self._waiting = WaitingSequences(self._shares)
        self._running = OrderedSequences()
        self._prompt_rows = PromptRows()
        self._num_added = 0
        self._num_sequences = 0
        self._step_id = 0
        self._in_flight: dict[int, int] = {}  # sequence → epoch, of the plan `_step_id`
        self._room = self._config.max_num_batched_tokens - 1  # see `room_for_drafts`
        self.num_unfinished = 0  # sequences that have not ended
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up, once per request
        self.prefix_hits = 0  # of these found

    # --- figures -------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences with a place in the running set."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a place: not yet admitted, forking, or parked."""
        return self.num_unfinished - len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether `add` takes one more: the queue's bound, and the places that are free now."""
        places = self._config.max_num_seqs - len(self._running)
        return self._requests.num_queued < self._config.max_num_queued + max(places, 0)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks that sequences hold, of the fullest group; 0 … 1."""
        return self._kv.usage

    @property
    def lacking_one(self) -> list[Sequence]:
        """Running sequences whose next step computes one token: those that drafts may go with."""
        return [s for s in self._running if len(s.tokens) - s.num_computed_tokens == 1]

    @property
    def room_for_drafts(self) -> int:
        """Rows that steps had left beside known tokens; none where these did not all fit."""
        return self._room

    # --- requests come and go --------------------------------------------------------------------

    def add(self, request: Request, *, seed: int, max_total_tokens: int) -> list[Sequence]:
        """Queue a request; `max_total_tokens` is prompt and output together.

        Raises:
            ContextLengthExceeded: it does not fit the context, or never the KV blocks.
            BadRequest: it cannot be served for another reason, which the message names.
            Overloaded: too many requests wait for their first admission.
        """
        if request.request_id in self._requests:
            raise BadRequest(f"request id {request.request_id!r} is in use", param="request_id")
        check_request(
            request,
            max_total_tokens,
            max_model_len=self._config.max_model_len,
            slots_alone=self._kv.slots_alone(
                forks=request.params.n > 1, unbroken=longest(request.spans)
            ),
            takes_images=self._strands.takes_images,
        )
        self._strands.check(request)
        if not self.has_room:
            raise Overloaded(
                f"{self._requests.num_queued} requests are waiting, as many as the queue takes; "
                "retry later"
            )
        sequences = [
            Sequence(
                seq_id=self._num_sequences + index,
                request=request,
                index=index,
                arrival=self._num_added,
                tokens=list(request.prompt_token_ids),
                max_total_tokens=max_total_tokens,
                seed=sequence_seed(seed, index),
                state=SequenceState.FORKING if index else SequenceState.WAITING,
            )
            for index in range(request.params.n)
        ]
        self._num_added += 1
        self._num_sequences += len(sequences)
        self.num_unfinished += len(sequences)
        self._requests.add(sequences)
        for sequence in sequences:
            self._kv.open(sequence, forks=sequence.index == 0 and len(sequences) > 1)
            self._shares.open(sequence)
        self._waiting.add(sequences[0], resumed=False)
        self._prompt_rows.open(sequences[0])
        return list(sequences)

    def abort(self, request_id: str) -> list[Sequence]:
        """End a request's unfinished sequences; their blocks are free at once."""
        ended = self._requests.sequences(request_id)
        for sequence in ended:
            self._finish(sequence, FinishReason.ABORT)
        return ended

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
    ) -> None:
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        self.num_unfinished -= 1
        sequence.drafts.clear()
        self._waiting.discard(sequence)
        self._running.discard(sequence)
        self._strands.release(sequence)
        self._kv.close(sequence)
        self._shares.close(sequence)
        self._prompt_rows.close(sequence)
        self._requests.ended(sequence)

    def _fail(self, request_id: str, failure: tuple[str, str]) -> list[Sequence]:
        ended = self._requests.sequences(request_id)
        for sequence in ended:
            sequence.failure = failure
            self._finish(sequence, FinishReason.ERROR)
        return ended

    # --- plan ------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan | None:
        """Choose the next step's spans. None: nothing can run now.

        Then either nothing is unfinished, or a strand is `busy`: ask again, after a moment.
        Sequences whose deadline has passed at `now_s`, and those that a strand refuses, end and
        stand in `finished`; a plan may hold nothing else. A plan that is never committed is as if
        it had not been, apart from blocks taken.
        """
        step = Choices(self._config.max_num_batched_tokens)
        self._expire(step, now_s)
        self._strands.begin(now_s)
        self._waiting.begin()
        self._choose_known(step)
        if not step.chosen and not step.finished:
            assert not self.num_unfinished or self._strands.busy, "a plan without progress"
            return None
        self._step_id += 1
        self._room = self._left_over(step)
        self._in_flight = {s: chosen.sequence.epoch for s, chosen in step.chosen.items()}
        return StepPlan(
            step_id=self._step_id,
            spans=tuple(self._span(chosen) for chosen in step.chosen.values()),
            finished=tuple(step.finished),
            preempted=tuple(step.preempted.values()),
        )

    def _left_over(self, step: Choices) -> int:
        """Rows of a step that no known token wanted, whether drafts took them or nobody."""
        if step.budget <= 0:
            kept_out = len(self._running) < self._num_slots and self._waiting.first() is not None
            if kept_out or any(step.leaves_out(sequence) for sequence in self._running):
                return 0
        num_drafts = sum(len(chosen.drafts) for chosen in step.chosen.values())
        return max(0, step.budget + num_drafts)

    def _expire(self, step: Choices, now_s: float) -> None:
        message = "the deadline passed before the answer was complete"
        for request_id in self._requests.expire(now_s):
            step.finished += self._fail(request_id, (DeadlineExceeded.code, message))

    def _choose_known(self, step: Choices) -> None:
        while True:
            num_parked = len(step.preempted)
            self._choose_running(step)
            self._choose_chunks_and_admissions(step)
            if step.chosen or step.finished or len(step.preempted) == num_parked:
                return
            # Who parked held what those that were asked before it had to wait for: once more.

    def _choose_running(self, step: Choices) -> None:
        """Sequences that lack one token: each gets its row, drafts get what is left over."""
        rows_kept = len(self._running)
        for sequence in list(self._running):
            if len(sequence.tokens) - sequence.num_computed_tokens != 1:
                continue
            if sequence.state is not SequenceState.RUNNING:
                continue  # parked for one before it
            rows_kept -= 1
            if not self._strands.fit(sequence, 1):
                continue
            drafts = self._usable_drafts(sequence, step.budget - rows_kept - 1)
            # Drafts are a guess: they take free blocks, but nobody's work.
            granted = self._grow(sequence, 1 + len(drafts), reclaim=False)
            if granted or self._grow_or_park(step, sequence, 1):
                step.choose(sequence, 1, drafts[: max(granted, 1) - 1])

    def _choose_chunks_and_admissions(self, step: Choices) -> None:
        if len(step.chosen) == len(self._running) and self._waiting.is_empty:
            return  # as in most steps
        chunks = deque(s for s in self._running if s.seq_id not in step.chosen)
        admitting = True
        while step.budget > 0:
            admitting = admitting and self._waiting.num_passed_over < MAX_PASSED_OVER
            head = self._waiting.first() if admitting else None
            first = chunks[0] if chunks else None
            if head is not None and (first is None or _is_better(head, first)):
                admitting = self._admit(step, head)
            elif first is not None:
                chunks.popleft()
                if first.state is SequenceState.RUNNING and first.seq_id not in step.chosen:
                    self._choose_chunk(step, first)
            else:
                return

    def _choose_chunk(self, step: Choices, sequence: Sequence) -> None:
        num_tokens = self._fit(step, sequence)
        if num_tokens:
            fewest = least(sequence.request.spans, sequence.num_computed_tokens)
            granted = self._grow_or_park(step, sequence, num_tokens, at_least=fewest)
            self._choose(step, sequence, granted)

    def _fit(self, step: Choices, sequence: Sequence) -> int:
        """Known tokens to compute now: within the budget, but for a span that must be whole."""
        spans, start = sequence.request.spans, sequence.num_computed_tokens
        num_tokens = min(len(sequence.tokens) - start, step.budget)
        if spans:
            num_tokens = max(cut(spans, start, num_tokens), least(spans, start))
        return self._strands.fit(sequence, num_tokens)

    def _choose(self, step: Choices, sequence: Sequence, num_tokens: int) -> None:
        """Compute so many known tokens, or fewer where that would cut a span."""
        num_tokens = cut(sequence.request.spans, sequence.num_computed_tokens, num_tokens)
        if num_tokens:
            step.choose(sequence, num_tokens)

    def _usable_drafts(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        if not sequence.drafts:
            return ()
        # All drafts may hold, and one token more comes with them.
        most = min(room, sequence.max_total_tokens - len(sequence.tokens) - 1)
        return tuple(sequence.drafts[: max(0, most)])

    def _grow(
        self, sequence: Sequence, num_tokens: int, *, reclaim: bool, at_least: int = 1
    ) -> int:
        """Slots for up to `num_tokens` more; how many there are now, 0 for fewer than wanted."""
        if self._kv.covers(sequence, sequence.num_computed_tokens + num_tokens):
            return num_tokens
        reservation = self._kv.try_grow(sequence, num_tokens, reclaim=reclaim, at_least=at_least)
        if reservation is None:
            return 0
        reservation.commit()
        return reservation.num_tokens

    def _grow_or_park(
        self, step: Choices, sequence: Sequence, num_tokens: int, *, at_least: int = 1
    ) -> int:
        """As `_grow`, but parks running sequences for it; 0 if it had to park itself."""
        while not (granted := self._grow(sequence, num_tokens, reclaim=True, at_least=at_least)):
            victim = max(self._running, key=_worst_first)
            self._park(step, victim)
            if victim is sequence:
                return 0
        return granted

    def _park(self, step: Choices, sequence: Sequence) -> None:
        step.park(sequence)
        self._strands.release(sequence)
        self._running.discard(sequence)
        self._waiting.add(sequence, resumed=True)
        self._kv.park(sequence)
        sequence.state = SequenceState.WAITING
        sequence.drafts.clear()
        sequence.epoch += 1
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    # --- admission -------------------------------------------------------------------------------

    def _admit(self, step: Choices, head: Sequence) -> bool:
        """Let the first waiting sequence run, if it can; False: nobody may overtake it."""
        if not self._has_place_for(head):
            return False
        try:
            ready = self._strands.admit(head)
        except PlaitError as error:
            for ended in self._fail(head.request.request_id, (error.code, error.message)):
                step.finish(ended)
            return True
        if not ready:
            self._waiting.pass_over(head)
            return True
        reservation = self._reserve(step, head)
        if reservation is None:
            self._strands.release(head)
            return False
        reservation.commit()
        self._count_admission(head)
        self._waiting.discard(head)
        self._running.add(head)
        head.state = SequenceState.RUNNING
        self._choose(step, head, min(self._fit(step, head), reservation.num_tokens))
        return True

    def _has_place_for(self, head: Sequence) -> bool:
        if len(self._running) < self._num_slots:
            return True
        return _is_better(head, next(reversed(self._running)))

    def _reserve(self, step: Choices, head: Sequence) -> Reservation | None:
        """A place and blocks, if need be of sequences of worse priority."""
        reservation = self._try_admit(head) if len(self._running) < self._num_slots else None
        if reservation is None and not self._may_park_for(head):
            return None
        while reservation is None:
            self._park(step, max(self._running, key=_worst_first))
            reservation = self._try_admit(head)
        return reservation

    def _try_admit(self, head: Sequence) -> Reservation | None:
        hit_limit = self._prompt_rows.hit_limit(head)
        return self._kv.try_admit(head, hit_limit=hit_limit, alone=not self._running)

    def _may_park_for(self, head: Sequence) -> bool:
        """Whether parking only sequences of strictly worse priority makes room for `head`."""
        victims = [s for s in self._running if _is_better(head, s)]
        if not victims:
            return False
        alone = len(victims) == len(self._running)
        hit_limit = self._prompt_rows.hit_limit(head)
        return self._kv.could_admit(head, hit_limit=hit_limit, alone=alone, victims=victims)

    def _count_admission(self, sequence: Sequence) -> None:
        if not self._requests.admitted(sequence.request.request_id):
            return
        self._shares.charge(sequence, prompt=sequence.num_prompt_tokens)
        sequence.num_cached_tokens = sequence.num_computed_tokens
        if self._caching and sequence not in self._prompt_rows:
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.num_cached_tokens

    def _span(self, chosen: Chosen) -> Span:
        sequence, drafts = chosen.sequence, chosen.drafts
        start = sequence.num_computed_tokens
        known_end = start + chosen.num_tokens
        end = known_end + len(drafts)
        complete = known_end == len(sequence.tokens) < sequence.max_total_tokens
        num_blocks = -(-end // self._kv.block_size)
        return Span(
            sequence=sequence,
            start=start,
            num_tokens=end - start,
            num_samples=1 + len(drafts) if complete else 0,
            drafts=drafts,
            block_ids=tuple(tuple(table[:num_blocks]) for table in sequence.block_ids),
            wants_prompt_logprobs=self._prompt_rows.wants(sequence, end),
        )

    # --- commit ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, stop: Stop) -> list[Commit]:
        """Let the results of the plan in flight take effect.

        `stop(sequence, token)` is asked after each token was appended, and says whether and why
        the sequence ends with it (having set `failure`, if with ERROR); tokens after it are
        dropped. Results of sequences that ended or parked since are dropped as a whole.
        """
        if plan.step_id != self._step_id or len(result.spans) != len(plan.spans):
            raise ValueError("commit takes the results of the last plan, one per span")
        in_flight, self._in_flight = self._in_flight, {}
        current = [
            (span, outcome)
            for span, outcome in zip(plan.spans, result.spans, strict=True)
            if span.sequence.state is SequenceState.RUNNING
            and span.sequence.epoch == in_flight.get(span.sequence.seq_id)
        ]
        # Failures first: they end siblings too, whose results must then not take effect.
        commits: list[Commit] = []
        for span, outcome in current:
            error = outcome.error or contradiction(span, outcome)
            if error is not None:
                failure = (outcome.error_code if outcome.error else InternalError.code, error)
                ended = self._fail(span.sequence.request.request_id, failure)
                commits += [Commit(sequence=s, error=failure) for s in ended]
        for span, outcome in current:
            if span.sequence.state is SequenceState.RUNNING:
                commits += self._apply(span, outcome, stop)
        return commits

    def _apply(self, span: Span, outcome: SpanResult, stop: Stop) -> list[Commit]:
        sequence = span.sequence
        sequence.drafts.clear()
        sequence.num_draft_tokens += len(span.drafts)
        sequence.num_computed_tokens = span.start + span.num_tokens - len(span.drafts)
        prompt_logprobs = self._prompt_rows.take(span, outcome)
        ending: tuple[FinishReason, int | str | None] | None = None
        num_appended = 0
        for token in outcome.token_ids:
            # Of an accepted draft, the row that computed it is valid too.
            sequence.num_computed_tokens = len(sequence.tokens)
            sequence.tokens.append(token)
            num_appended += 1
            ending = stop(sequence, token) or self._at_length(sequence)
            if ending is not None:
                break
        sequence.num_accepted_tokens += min(num_appended, max(0, len(outcome.token_ids) - 1))
        if not outcome.token_ids:
            ending = self._at_length(sequence)
        self._shares.charge(sequence, output=num_appended)
        self._settle(sequence)
        if ending is not None:
            self._finish(sequence, ending[0], stop_reason=ending[1])
        if not (num_appended or prompt_logprobs or ending):
            return []
        return [
            Commit(
                sequence=sequence,
                token_ids=outcome.token_ids[:num_appended],
                logprobs=outcome.logprobs[:num_appended],
                prompt_logprobs=prompt_logprobs,
            )
        ]

    def _at_length(self, sequence: Sequence) -> tuple[FinishReason, None] | None:
        """The end by length. A prompt that wants no output ends once it is computed."""
        wanted = sequence.max_total_tokens
        if len(sequence.tokens) < wanted:
            return None
        computed = wanted if wanted == sequence.num_prompt_tokens else wanted - 1
        full = sequence.num_computed_tokens >= computed
        return (FinishReason.LENGTH, None) if full else None

    def _settle(self, sequence: Sequence) -> None:
        self._kv.settle(sequence)
        is_leader = sequence.index == 0 and sequence.request.params.n > 1
        if not is_leader or sequence.num_computed_tokens < sequence.num_prompt_tokens:
            return
        same = self._requests.sequences(sequence.request.request_id)
        siblings = [s for s in same if s.state is SequenceState.FORKING]
        if not siblings:
            return
        self._kv.fork(sequence, siblings)
        for sibling in siblings:
            sibling.state = SequenceState.WAITING
            sibling.num_cached_tokens = sequence.num_cached_tokens
            self._waiting.add(sibling, resumed=True)

    # --- integrity -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless all states, queues, tables and pools agree."""
        sequences = self._requests.unfinished()
        self._requests.check_integrity()
        self._kv.check_integrity(sequences)
        self._shares.check_integrity(sequences)
        self._strands.check_integrity(self._running)
        assert len(self._running) <= self._num_slots, "too many run"
        for sequence in sequences:
            state = sequence.state
            assert (state is SequenceState.RUNNING) == (sequence in self._running), state
            assert (state is SequenceState.WAITING) == (sequence in self._waiting), state
            parked = sequence in self._kv.parked
            assert not parked or state is SequenceState.WAITING, "parked while it runs"
            assert sequence.num_computed_tokens < len(sequence.tokens), "nothing left to compute"
            assert len(sequence.tokens) <= sequence.max_total_tokens, "too long"
        assert len(sequences) == self.num_unfinished, "miscounted"


def _is_better(one: Sequence, other: Sequence) -> bool:
    return one.request.priority < other.request.priority


def _worst_first(sequence: Sequence) -> tuple[int, int, int, int]:
    """The greatest is parked first: worst priority, then least work to lose, then latest."""
    computed = sequence.num_computed_tokens
    return (sequence.request.priority, -computed, sequence.arrival, sequence.index)
