"""What each step computes: computed tokens chase known tokens within a budget.

May enter: how requests come and go, and what planning a step and the result of it do to sequences.
May not enter: torch, text, sampling, clocks of its own, or how any feature works.

There is no prefill and no decode. A sequence has known tokens (prompt and output), drafts to
verify, and a number of computed tokens; `plan` lets the last chase the others. The parts are in
`scheduling`: `planner` says in which order, and why everyone finishes.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

import msgspec

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
from plait.platform.errors import BadRequest, DeadlineExceeded, InternalError, Overloaded
from plait.platform.kv.allocator import BlockAllocator
from plait.platform.kv.tables import BlockTables
from plait.platform.scheduling.admission import check_request
from plait.platform.scheduling.choices import Choices, Chosen
from plait.platform.scheduling.open_sequences import OpenSequences
from plait.platform.scheduling.planner import Planner
from plait.platform.scheduling.prompt_rows import contradiction
from plait.platform.scheduling.unbroken import longest
from plait.platform.strand import Strands

if TYPE_CHECKING:
    from plait.platform.config import CacheConfig, SchedulerConfig
    from plait.platform.strand import Strand

Ending = tuple[FinishReason, int | str | None]
Stop = Callable[[Sequence, int], Ending | None]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did to one sequence. It has ended if `sequence.finish_reason` is set."""

    sequence: Sequence
    token_ids: tuple[int, ...] = ()  # appended
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per appended token, if wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # the next ones; none is given twice
    error: tuple[str, str] | None = None  # (code, message)


class Scheduler:
    """Who runs, and what of it each step computes. One plan is in flight at a time.

    A step is `plan`, the computing of it by others, and `commit`. `add` and `abort` may come at
    any point between calls.
    """

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, strands: SequenceOf[Strand] = ()
    ) -> None:
        self._config = config
        self._strands = Strands(strands)
        self._tables = BlockTables(cache)
        self._allocator = BlockAllocator(
            self._tables, max_span=config.max_num_batched_tokens, watermark=config.watermark
        )
        self._sequences = OpenSequences(self._tables, self._strands)
        self._planner = Planner(
            self._sequences,
            self._tables,
            self._allocator,
            self._strands,
            num_slots=min(config.max_num_seqs, config.max_num_batched_tokens),
        )
        self._step_id = 0
        self._in_flight: dict[int, int] = {}  # sequence → epoch, of the plan `_step_id`
        self._room = config.max_num_batched_tokens - 1  # see `room_for_drafts`

    # --- figures -------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return self._sequences.num_unfinished

    @property
    def num_running(self) -> int:
        """Sequences with a place in the running set."""
        return len(self._sequences.running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a place: not yet admitted, forking, or parked."""
        return self.num_unfinished - self.num_running

    @property
    def num_preemptions(self) -> int:
        """How often a sequence lost its place."""
        return self._sequences.num_preemptions

    @property
    def prefix_queries(self) -> int:
        """Prompt tokens looked up in the cache, once per request."""
        return self._sequences.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Of these found."""
        return self._sequences.prefix_hits

    @property
    def has_room(self) -> bool:
        """Whether `add` takes one more: the queue's bound, and the places that are free now."""
        places = max(0, self._config.max_num_seqs - self.num_running)
        return self._sequences.requests.num_queued < self._config.max_num_queued + places

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks that sequences hold, of the fullest group; 0 … 1."""
        return self._tables.usage

    @property
    def lacking_one(self) -> list[Sequence]:
        """Running sequences whose next step computes one token: those that drafts may go with."""
        running = self._sequences.running
        return [s for s in running if len(s.tokens) - s.num_computed_tokens == 1]

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
        if request.request_id in self._sequences.requests:
            raise BadRequest(f"request id {request.request_id!r} is in use", param="request_id")
        check_request(
            request,
            max_total_tokens,
            max_model_len=self._config.max_model_len,
            slots_alone=self._allocator.slots_alone(
                forks=request.params.n > 1, unbroken=longest(request.spans)
            ),
            takes_images=self._strands.takes_images,
        )
        self._strands.check(request)
        if not self.has_room:
            raise Overloaded(
                f"{self._sequences.requests.num_queued} requests are waiting, as many as the queue "
                "takes; retry later"
            )
        return self._sequences.add(request, seed=seed, max_total_tokens=max_total_tokens)

    def abort(self, request_id: str) -> list[Sequence]:
        """End a request's unfinished sequences; their blocks are free at once."""
        ended = self._sequences.requests.sequences(request_id)
        for sequence in ended:
            self._sequences.finish(sequence, FinishReason.ABORT)
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
        self._planner.choose(step)
        if not step.chosen and not step.finished:
            assert not self.num_unfinished or self._strands.busy, "a plan without progress"
            return None
        self._step_id += 1
        self._room = self._planner.left_over(step)
        self._in_flight = {s: chosen.sequence.epoch for s, chosen in step.chosen.items()}
        return StepPlan(
            step_id=self._step_id,
            spans=tuple(self._span(chosen) for chosen in step.chosen.values()),
            finished=tuple(step.finished),
            preempted=tuple(step.preempted.values()),
        )

    def _expire(self, step: Choices, now_s: float) -> None:
        message = "the deadline passed before the answer was complete"
        for request_id in self._sequences.requests.expire(now_s):
            step.finished += self._sequences.fail(request_id, (DeadlineExceeded.code, message))

    def _span(self, chosen: Chosen) -> Span:
        sequence, drafts = chosen.sequence, chosen.drafts
        start = sequence.num_computed_tokens
        known_end = start + chosen.num_tokens
        end = known_end + len(drafts)
        complete = known_end == len(sequence.tokens) < sequence.max_total_tokens
        num_blocks = -(-end // self._tables.block_size)
        return Span(
            sequence=sequence,
            start=start,
            num_tokens=end - start,
            num_samples=1 + len(drafts) if complete else 0,
            drafts=drafts,
            block_ids=tuple(tuple(table[:num_blocks]) for table in sequence.block_ids),
            wants_prompt_logprobs=self._sequences.prompt_rows.wants(sequence, end),
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
                ended = self._sequences.fail(span.sequence.request.request_id, failure)
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
        prompt_logprobs = self._sequences.prompt_rows.take(span, outcome)
        num_appended, ending = _append(sequence, outcome.token_ids, stop)
        sequence.num_accepted_tokens += min(num_appended, max(0, len(outcome.token_ids) - 1))
        self._sequences.shares.charge(sequence, output=num_appended)
        self._settle(sequence)
        if ending is not None:
            self._sequences.finish(sequence, *ending)
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

    def _settle(self, sequence: Sequence) -> None:
        self._tables.settle(sequence)
        leads = sequence.index == 0 and sequence.request.params.n > 1
        if leads and sequence.num_computed_tokens >= sequence.num_prompt_tokens:
            self._sequences.fork(sequence)

    # --- integrity -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless all states, queues, tables and pools agree."""
        self._sequences.check_integrity()
        self._planner.check_integrity()


def _append(
    sequence: Sequence, token_ids: tuple[int, ...], stop: Stop
) -> tuple[int, Ending | None]:
    """Append what a step gave, up to the token that ends the sequence: how many, and that end."""
    num_known = len(sequence.tokens)
    ending = None if token_ids else _at_length(sequence)
    for token in token_ids:
        # Of an accepted draft, the row that computed it is valid too.
        sequence.num_computed_tokens = len(sequence.tokens)
        sequence.tokens.append(token)
        ending = stop(sequence, token) or _at_length(sequence)
        if ending is not None:
            break
    return len(sequence.tokens) - num_known, ending


def _at_length(sequence: Sequence) -> Ending | None:
    """The end by length. A prompt that wants no output ends once it is computed."""
    wanted = sequence.max_total_tokens
    if len(sequence.tokens) < wanted:
        return None
    computed = wanted if wanted == sequence.num_prompt_tokens else wanted - 1
    full = sequence.num_computed_tokens >= computed
    return (FinishReason.LENGTH, None) if full else None
