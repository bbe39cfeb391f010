"""The engine requests of one HTTP request, run together to their ends.

One engine request per prompt, each with `n` sequences. Closing `events` early (the client went
away, or one sequence failed) closes every engine stream, which aborts what is unfinished.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from plait.platform.core import CompiledGrammar, Event, Request, SamplingParams, TokenLogprobs
from plait.platform.errors import BadRequest, GrammarTooComplex, InternalError, Overloaded
from plait.platform.server.errors import event_error
from plait.platform.server.responses import (
    DraftCounts,
    PromptTokensDetails,
    Usage,
    completion_details,
)

if TYPE_CHECKING:
    from plait.platform.server.call import Call
    from plait.platform.server.context import ServerContext
    from plait.platform.server.metrics import SequenceTimer
    from plait.platform.server.prompts import Prompt
    from plait.platform.server.structured.replies import Reading
    from plait.structured.spec import GrammarSpec


@dataclass(slots=True, kw_only=True)
class Answer:
    """One sequence's answer as it grows."""

    prompt: Prompt
    prompt_index: int
    index: int  # of the choice
    timer: SequenceTimer
    num_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    drafts: dict[str, DraftCounts] = field(default_factory=dict)  # by source, so far
    reading: Reading | None = None  # of calls and thinking; None: the text is the content

    def add(self, event: Event) -> None:
        """Count an event and keep its content."""
        self.num_tokens = event.num_output_tokens
        for source, num_drafted, num_accepted in event.draft_counts:
            self.drafts[source] = DraftCounts(drafted=num_drafted, accepted=num_accepted)
        if event.text:
            self.texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason.value
            self.stop_reason = event.stop_reason


class Generation:
    """Runs requests, keeps their answers and counts their tokens."""

    def __init__(
        self,
        context: ServerContext,
        call: Call,
        requests: list[Request],
        prompts: list[Prompt],
        constraint_param: str | None = None,
    ) -> None:
        self._context = context
        self._call = call
        self._constraint_param = constraint_param  # the field whose grammar holds, for errors
        self._requests = requests  # until they are sent: images are large
        self._num_image_tokens = sum(p.images.num_tokens for p in prompts if p.images)
        self.prompts = prompts = [replace(p, images=None) for p in prompts]
        grammar = requests[0].grammar
        self.warnings = list(grammar.notes) or None if grammar is not None else None
        self._num_cached = [0] * len(prompts)
        self._seen = [False] * len(prompts)
        # Of each prompt, once it is computed and if they were asked for.
        self.prompt_logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * len(prompts)
        params = requests[0].params
        self._n = params.n
        self.answers = [
            Answer(
                prompt=prompts[i // params.n],
                prompt_index=i // params.n,
                index=i,
                timer=context.metrics.sequence(
                    call.arrival_s, params, len(prompts[i // params.n].token_ids)
                ),
            )
            for i in range(params.n * len(prompts))
        ]

    async def events(self) -> AsyncGenerator[tuple[Answer, Event]]:
        """Events of all sequences as they come. Raises `PlaitError` where one of them fails."""
        timeout_s = self._call.time_left_s()
        streams = [
            self._context.client.stream(request, timeout_s=timeout_s)
            for request in self._given_up()
        ]
        async with aclosing(merge(streams)) as merged:
            async for prompt_index, event in merged:
                yield self._take(prompt_index, event), event
        if any(answer.finish_reason is None for answer in self.answers):
            raise InternalError("the engine's stream ended before the answer was complete")

    def _given_up(self) -> list[Request]:
        requests, self._requests = self._requests, []
        return requests

    def _take(self, prompt_index: int, event: Event) -> Answer:
        error = event_error(event)
        if error is not None:
            if isinstance(error, GrammarTooComplex):
                error.param = self._constraint_param
            raise error
        answer = self.answers[prompt_index * self._n + event.index]
        answer.add(event)
        answer.timer.event(event)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs[prompt_index] = event.prompt_logprobs
        cached = event.num_cached_tokens
        # Later sequences share the first one's blocks; what it found is what was cached.
        if not self._seen[prompt_index] or cached < self._num_cached[prompt_index]:
            self._seen[prompt_index] = True
            self._num_cached[prompt_index] = cached
        return answer

    async def run(self) -> None:
        """Run to the end."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass

    @property
    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many answers it gets."""
        prompt = sum(len(p.token_ids) for p in self.prompts)
        output = sum(answer.num_tokens for answer in self.answers)
        details = PromptTokensDetails(cached_tokens=sum(self._num_cached))
        if self._num_image_tokens:
            details.image_tokens = self._num_image_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=details,
            completion_tokens_details=completion_details(answer.drafts for answer in self.answers),
        )

    def close(self) -> None:
        """Account for what ended early."""
        for answer in self.answers:
            answer.timer.close()


async def merge(streams: list[AsyncIterator[Event]]) -> AsyncGenerator[tuple[int, Event]]:
    """Events of all streams with the index of their stream; the first failure ends them all."""
    if len(streams) == 1:
        async with aclosing(cast("AsyncGenerator[Event]", streams[0])) as stream:
            async for event in stream:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_feed(i, s, queue)) for i, s in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            index, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(
    index: int,
    stream: AsyncIterator[Event],
    queue: asyncio.Queue[tuple[int, Event | Exception | None]],
) -> None:
    try:
        async with aclosing(cast("AsyncGenerator[Event]", stream)) as events:
            async for event in events:
                queue.put_nowait((index, event))
    except Exception as error:  # noqa: BLE001 - raised again by the reader
        queue.put_nowait((index, error))
    else:
        queue.put_nowait((index, None))


@asynccontextmanager
async def generation(  # noqa: PLR0913 (what a generation is made of)
    context: ServerContext,
    call: Call,
    params: SamplingParams,
    num_prompts: int,
    make_prompts: Callable[[int], list[Prompt]],
    constrain: Callable[[Prompt], GrammarSpec] | None = None,
    prepare: Callable[[int], Awaitable[None]] | None = None,
) -> AsyncIterator[Generation]:
    """A place in the queue, prompts tokenized by `make_prompts(room)`, and what runs them.

    `prepare(room)` is awaited before prompts are made. `constrain` tells from the first prompt
    which grammar holds; other requests go on while that is compiled. Raises `Overloaded` before
    any work where there is no place.
    """
    try:
        with context.admission.enter(num_prompts) as config:
            room = config.scheduler.max_model_len - max(1, params.max_tokens or 1)
            if prepare is not None:
                await prepare(room)
            running = await _made(context, call, params, make_prompts, room, constrain)
            num_requests = len(running.prompts)
            names = [one.name for one in call.target.adapters]
            context.usage.started(names, num_requests)
            try:
                yield running
            finally:
                running.close()
                usage = running.usage
                call.log_usage(usage)
                context.usage.ended(names, num_requests, usage)
            for _ in range(num_requests):
                context.admission.drain_rate.completed()
    except Overloaded:
        context.count_rejection()
        raise


async def _made(
    context: ServerContext,
    call: Call,
    params: SamplingParams,
    make_prompts: Callable[[int], list[Prompt]],
    room: int,
    constrain: Callable[[Prompt], GrammarSpec] | None,
) -> Generation:
    """Prompts and requests; nothing else holds them when this returns."""
    grammar = param = None
    if constrain is not None:
        made = await context.in_pool(make_prompts, room)
        make_prompts = partial(_same, made)
        spec = constrain(made[0])
        param = spec.param
        grammar = await context.grammars.compile(
            spec,
            target=call.target,
            tenant=call.tenant,
            time_left_s=call.time_left_s(),
        )
    prompts, requests = await context.in_pool(
        _requests, context, call, params, make_prompts, room, grammar
    )
    return Generation(context, call, requests, prompts, param)


def _same(prompts: list[Prompt], _room: int) -> list[Prompt]:
    return prompts


def _requests(
    context: ServerContext,
    call: Call,
    params: SamplingParams,
    make_prompts: Callable[[int], list[Prompt]],
    room: int,
    grammar: CompiledGrammar | None,
) -> tuple[list[Prompt], list[Request]]:
    """Tokenize and check, in the thread pool."""
    prompts = make_prompts(room)
    call.time_left_s()  # a deadline that has passed already ends it here
    try:
        requests = [_request(context, call, params, i, p, grammar) for i, p in enumerate(prompts)]
    except BadRequest as error:
        if error.param == "prompt":
            error.param = call.prompt_param
        raise
    return prompts, requests


def _request(
    context: ServerContext,
    call: Call,
    params: SamplingParams,
    index: int,
    prompt: Prompt,
    grammar: CompiledGrammar | None,
) -> Request:
    return context.intake.request(
        request_id=call.engine_request_id(index),
        prompt_token_ids=prompt.token_ids,
        params=params,
        priority=call.priority,
        speculation=call.speculation,
        cache_salt=call.cache_salt,
        adapters=[(one.info, one.scale) for one in call.target.adapters],
        tenant=call.tenant,
        share=call.share,
        grammar=grammar,
        tokenizer=call.target.tokenizer,
        images=prompt.images,
    )
