"""The engine: take requests, run steps, hand out events.

May enter: the order of a step's parts, and what keeps one request's fault its own. May not
enter: sockets, HTTP, text formats, kernels, or the logic of a single feature; those have parts
of their own.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import msgspec

from plait.platform.batch import build
from plait.platform.core import Event, FinishReason, Span, SpanResult, StepPlan, StepResult
from plait.platform.drafting import NoDrafts
from plait.platform.errors import AdapterUnavailable, InternalError, PlaitError
from plait.platform.messages import AdapterLoaded, Stats
from plait.platform.metered import Metered
from plait.platform.row_counts import RowCounts
from plait.platform.sampling import Sampler
from plait.platform.scheduler import Commit, Scheduler
from plait.platform.scheduling.stopping import check_stop
from plait.platform.strand import Strands
from plait.platform.text.output import OutputText

if TYPE_CHECKING:
    from plait.adapters.info import AdapterState
    from plait.adapters.pool import AdapterPool
    from plait.platform.config import EngineConfig
    from plait.platform.core import Request, Sequence, TokenLogprobs
    from plait.platform.drafting import Drafter
    from plait.platform.executor import Executor
    from plait.platform.messages import LoadAdapter
    from plait.platform.metered import Total
    from plait.platform.step_trace import StepTrace
    from plait.platform.strand import Strand
    from plait.platform.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# What waits for a strand is asked for anew so often; what the strand has finished, at once.
WAIT_S = 0.005
# How old the parts of the steps' time may be in `Stats`, which leaves with most steps' events.
PHASES_AGE_S = 1.0

_COUNTED = ("num_steps", "prompt_tokens", "generation_tokens")


class Engine:
    """One model, many sequences. Not thread-safe: one thread adds, aborts and steps.

    Every request that `add` accepts ends in exactly one event with a `finish_reason` for each
    of its sequences, whatever happens to it.
    """

    def __init__(  # noqa: PLR0913 (parts, each of which may be missing)
        self,
        config: EngineConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        *,
        strands: SequenceOf[Strand] = (),
        adapters: AdapterPool | None = None,
        drafter: Drafter | None = None,
        sampler: Sampler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config.scheduler, config.cache, strands)
        self._strands = Strands(strands)
        self._adapters = adapters
        self._drafter = drafter or NoDrafts()
        self._answers: list[AdapterLoaded] = []  # to adapters that no pool takes
        self._executor = executor
        self._metered = Metered(executor)
        self._tokenizer = tokenizer
        self._extended: dict[str, Tokenizer] = {}  # of generations that add tokens
        self._sampler = sampler or Sampler(config.model.vocab_size, config.model.eos_token_ids)
        self._clock = clock
        self._seeds = random.Random(config.options.seed)  # None seeds from the system
        self._pending: list[Event] = []  # made outside a step
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._rows = RowCounts()
        self._trace: StepTrace | None = None
        self._last_rows = 0
        self._step_seconds = 0.0

    @property
    def drafter(self) -> Drafter:
        """What drafts tokens ahead."""
        return self._drafter

    # --- what enters ---

    def add(self, request: Request) -> None:
        """Queue a request. Raises `Overloaded`, `ContextLengthExceeded`, `AdapterUnavailable`."""
        params = request.params
        if request.adapters and self._adapters is None:
            raise _no_adapters()
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        assert params.max_tokens is not None, "Intake resolves max_tokens"
        sequences = self.scheduler.add(
            request,
            seed=seed % 2**64,
            max_total_tokens=len(request.prompt_token_ids) + params.max_tokens,
        )
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[request.request_id] = []  # stays empty for a prompt of one token
        now = self._clock()
        for sequence in sequences:
            sequence.added_s = now
            if self._tokenizer is not None:
                sequence.text = OutputText(
                    self._tokenizer_of(request), params, request.prompt_token_ids
                )

    def _tokenizer_of(self, request: Request) -> Tokenizer:
        """That which knows the tokens its adapters add; of several, all add the same."""
        assert self._tokenizer is not None
        found = (self._extended.get(use.generation) for use in request.adapters)
        return next((one for one in found if one is not None), self._tokenizer)

    def abort(self, request_id: str) -> None:
        """End a request's unfinished sequences; unknown or finished ones are no error."""
        for sequence in self.scheduler.abort(request_id):
            self._pending.append(self._final_event(sequence))

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return self.num_unfinished > 0 or bool(self._pending)

    @property
    def has_room(self) -> bool:
        """Whether `add` takes one more request."""
        return self.scheduler.has_room

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return self.scheduler.num_unfinished

    @property
    def num_steps(self) -> int:
        """Steps that were run."""
        return self._counts["num_steps"]

    # --- adapters ---

    def load_adapter(self, message: LoadAdapter) -> None:
        """Begin to load a generation; after some steps `take_adapter_results` has the answer."""
        if self._adapters is not None:
            if self._tokenizer is not None and message.added_tokens:
                extended = self._tokenizer.extended(message.added_tokens)
                self._extended[message.generation] = extended
            self._adapters.load(message)
            return
        error = _no_adapters()
        self._answers.append(
            AdapterLoaded(generation=message.generation, error=(error.code, error.message))
        )

    def pin_adapter(self, generation: str, pinned: bool) -> None:
        """Keep a generation on the device, or let it be evicted. Raises kinds of `AdapterError`."""
        if self._adapters is None:
            raise _no_adapters()
        self._adapters.pin(generation, pinned=pinned)

    def drop_adapter(self, generation: str) -> None:
        """Forget a generation once no sequence uses it; an unknown one is no error."""
        self._extended.pop(generation, None)
        self._drafter.forget(generation)
        if self._adapters is not None:
            self._adapters.drop(generation)

    def take_adapter_results(self) -> list[AdapterLoaded]:
        """Answers to `load_adapter` since the last call."""
        answers, self._answers = self._answers, []
        return answers if self._adapters is None else self._adapters.take_answers()

    def adapter_states(self) -> dict[str, AdapterState] | None:
        """How all generations stand; None where nothing changed since the last call."""
        return None if self._adapters is None else self._adapters.take_states()

    @property
    def is_loading(self) -> bool:
        """Whether adapters are under way, so that `step` may have something to do without work."""
        return self._adapters is not None and self._adapters.busy

    # --- the step ---

    def step(self) -> list[Event]:
        """Run one step; return what it made known, in no particular order of requests.

        Where all that is unfinished waits for a strand, it waits for it, for `WAIT_S` at most.
        """
        began = self._clock()
        events, self._pending = self._pending, []
        self._drafter.draft(self.scheduler.lacking_one, self.scheduler.room_for_drafts)
        computing = self._clock()
        plan = self.scheduler.plan(began)
        if plan is None:
            if not events:
                self._wait()
            return events
        events += [self._final_event(sequence) for sequence in plan.finished]
        for span in plan.spans:
            if span.sequence.started_s is None:
                span.sequence.started_s = began
        if plan.spans:
            result = self._compute(plan)
            self._drafter.computed(plan, result, self._clock() - computing)
            for commit in self.scheduler.commit(plan, result, self._stop):
                self._count_tokens(commit)
                events += self._events(commit)
        self._count(plan, events, began)
        return events

    def _wait(self) -> None:
        if self.num_unfinished:
            self._strands.wait(WAIT_S)
        elif self._adapters is not None and self._adapters.busy:
            self._adapters.wait(WAIT_S)

    def _compute(self, plan: StepPlan) -> StepResult:
        """Forward, logits, sampling. A fault is pinned on the spans that cause it.

        Computing a span again is safe: it writes the same values into the same slots.
        """
        try:
            return self._forward(plan)
        except Exception:
            log.exception("step %d failed with %d spans", plan.step_id, len(plan.spans))
        return StepResult(spans=tuple(self._compute_alone(plan, span) for span in plan.spans))

    def _compute_alone(self, plan: StepPlan, span: Span) -> SpanResult:
        try:
            return self._forward(msgspec.structs.replace(plan, spans=(span,))).spans[0]
        except PlaitError as error:
            return SpanResult(error=error.message, error_code=error.code)
        except Exception as error:
            log.exception("request %s failed", span.sequence.request.request_id)
            return SpanResult(error=f"computing this request failed ({type(error).__name__})")

    def _forward(self, plan: StepPlan) -> StepResult:
        batch = build(plan, self.config.cache.block_size)
        masks = self._strands.stage(plan)
        self._rows.count(plan, batch, is_masked=masks is not None)
        embeds = self._strands.embeds(plan)
        taps, wanted = None, self._drafter.taps(plan)
        if wanted:
            hidden, taps = self._metered.forward_tapped(batch, wanted, embeds)
        else:
            hidden = self._metered.forward(batch, embeds)
        result = self._sampler.sample(plan, batch, hidden, self._metered, masks)
        self._drafter.ingest(plan, batch, taps, result)
        return result

    def _stop(
        self, sequence: Sequence, token_id: int
    ) -> tuple[FinishReason, int | str | None] | None:
        """Why `sequence` ends with a token, if it does: the stop rules', or that it is complete."""
        try:
            ending = check_stop(sequence, token_id, self.config.model.eos_token_ids)
            complete = self._strands.commit(sequence, token_id)
        except PlaitError as error:
            sequence.failure = (error.code, error.message)
            return FinishReason.ERROR, None
        except Exception:
            log.exception("request %s failed", sequence.request.request_id)
            sequence.failure = (InternalError.code, "the text of this answer could not be made")
            return FinishReason.ERROR, None
        if complete and (ending is None or ending[0] is FinishReason.LENGTH):
            return FinishReason.STOP, None
        return ending

    # --- what leaves ---

    def _events(self, commit: Commit) -> list[Event]:
        sequence = commit.sequence
        request = sequence.request
        if commit.prompt_logprobs:
            known = self._prompt_logprobs.setdefault(request.request_id, [])
            known.extend(commit.prompt_logprobs)
        finish = sequence.finish_reason
        if not commit.token_ids and finish is None:
            return []
        if finish is FinishReason.ERROR:
            return [self._final_event(sequence)]
        return [self._event(sequence, commit, final=finish is not None)]

    def _event(self, sequence: Sequence, news: Commit | None = None, *, final: bool) -> Event:
        request = sequence.request
        first = sequence.num_output_tokens > 0 or final
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None and sequence.index == 0 and first:
            known = self._prompt_logprobs.pop(request.request_id, None)
            prompt_logprobs = None if known is None else tuple(known)
        return Event(
            request_id=request.request_id,
            index=sequence.index,
            token_ids=() if news is None else news.token_ids,
            logprobs=() if news is None else news.logprobs,
            text="" if sequence.text is None else sequence.text.take(final=final),
            prompt_logprobs=prompt_logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_draft_tokens=sequence.num_draft_tokens,
            num_accepted_tokens=sequence.num_accepted_tokens,
            draft_counts=_draft_counts(sequence),
            queued_s=(sequence.started_s or sequence.added_s) - sequence.added_s,
            num_preemptions=sequence.num_preemptions,
            error=sequence.failure,
        )

    def _final_event(self, sequence: Sequence) -> Event:
        """The last event of a sequence that ended outside sampling: abort, deadline, fault."""
        event = self._event(sequence, final=True)
        self._prompt_logprobs.pop(sequence.request.request_id, None)
        return event

    # --- what is counted ---

    def phases(self) -> dict[str, Total]:
        """What parts of the steps took until now."""
        return self._metered.phases()

    @property
    def stats(self) -> Stats:
        """Gauges and counters as they stand."""
        scheduler = self.scheduler
        figures: dict[str, Any] = {
            **self._counts,
            **self._rows.figures,
            **self._strands.figures,
        }
        if self._adapters is not None:
            figures.update(self._adapters.figures)
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=scheduler.kv_usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            last_step_rows=self._last_rows,
            step_seconds=self._step_seconds,
            phases=self._metered.phases(max_age_s=PHASES_AGE_S),
            **figures,
        )

    def trace(self, trace: StepTrace) -> None:
        """Have each step from now on written there."""
        trace.begin(self.stats)
        self._trace = trace

    def _count(self, plan: StepPlan, events: SequenceOf[Event], began: float) -> None:
        self._last_rows = plan.num_rows
        self._step_seconds += self._clock() - began
        self._counts["num_steps"] += 1
        if self._trace is not None and self._trace.is_open:
            num_adapters = self._rows.newest_adapters
            self._trace.step(plan, events, self.stats, began_s=began, num_adapters=num_adapters)

    def _count_tokens(self, commit: Commit) -> None:
        """A prompt counts once, when it is done, however often parking had it computed."""
        sequence, num_new = commit.sequence, len(commit.token_ids)
        self._counts["generation_tokens"] += num_new
        if sequence.index == 0 and num_new == sequence.num_output_tokens:
            prompt_done = num_new > 0 or sequence.finish_reason is FinishReason.LENGTH
            self._counts["prompt_tokens"] += sequence.num_prompt_tokens * prompt_done


def _draft_counts(sequence: Sequence) -> tuple[tuple[str, int, int], ...]:
    if not sequence.draft_counts:
        return ()
    return tuple((s, c[0], c[1]) for s, c in sorted(sequence.draft_counts.items()))


def _no_adapters() -> AdapterUnavailable:
    return AdapterUnavailable(
        "this engine serves no adapters: it was started with --adapter-memory 0"
    )
