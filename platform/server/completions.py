"""/v1/completions: one prompt or several, `n` continuations of each, echo and legacy logprobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, ExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait.platform.core import Event, SamplingParams, TokenLogprobs
from plait.platform.errors import InternalError
from plait.platform.server import prompts
from plait.platform.server.adapters.defaults import with_defaults
from plait.platform.server.call import Call, begin
from plait.platform.server.generation import Answer, Generation, generation
from plait.platform.server.logprobs import LegacyLogprobs, LogprobsFormat, join
from plait.platform.server.openapi import takes
from plait.platform.server.params import completion_params
from plait.platform.server.responses import Completion, CompletionChoice, Usage, encode
from plait.platform.server.schemas import CompletionRequest
from plait.platform.server.streaming import DONE, EventStream, event_block, until_disconnected
from plait.platform.server.structured.replies import constraint_of

if TYPE_CHECKING:
    from plait.platform.server.context import ServerContext
    from plait.structured.spec import GrammarSpec


def completions_router(context: ServerContext) -> APIRouter:
    """Routes of this family."""
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=takes(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue text; with `stream`, as server-sent events."""
        body = await context.read(request, CompletionRequest)
        with ExitStack() as held:
            call = await begin(context, request, body, held, prefix="cmpl", prompt_param="prompt")
            work = _prepare(context, call, with_defaults(body, call.target.bundle))
            if body.stream:
                on_end = held.pop_all().close
                return EventStream(work.blocks(), context.settings, call.request_id, on_end)
            return await until_disconnected(request.receive, work.answer())

    return router


def _prepare(context: ServerContext, call: Call, body: CompletionRequest) -> _Continuation:
    params = completion_params(body, context.settings.limits)
    return _Continuation(
        context=context,
        call=call,
        body=body,
        params=params,
        given=prompts.split_prompts(body, context.settings.limits),
        constraint=constraint_of(body),
        form=LogprobsFormat(call.target.tokenizer, params, as_ids=body.return_tokens_as_token_ids),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Continuation:
    """One completion request, checked."""

    context: ServerContext
    call: Call
    body: CompletionRequest
    params: SamplingParams
    given: list[str | list[int]]
    constraint: GrammarSpec | None
    form: LogprobsFormat

    def _generation(self) -> AbstractAsyncContextManager[Generation]:
        constraint = self.constraint
        return generation(
            self.context,
            self.call,
            self.params,
            len(self.given),
            self._prompts,
            None if constraint is None else lambda _: constraint,
        )

    def _prompts(self, room: int) -> list[prompts.Prompt]:
        return prompts.encode_prompts(self.call.target.tokenizer, self.given, self.body, room)

    async def answer(self) -> Response:
        """All choices in one body, those of the first prompt first."""
        async with self._generation() as running:
            await running.run()
            if self.params.logprobs is None and self.params.prompt_logprobs is None:
                content = self._encode(running)
            else:
                content = await self.context.in_pool(self._encode, running)
        return Response(content, media_type="application/json")

    def _encode(self, running: Generation) -> bytes:
        choices = [self._choice(running, answer) for answer in running.answers]
        return encode(self._completion(choices, running.usage, running.warnings))

    def _choice(self, running: Generation, answer: Answer) -> CompletionChoice:
        with_ids = self.body.return_token_ids
        top = self.body.prompt_logprobs
        return CompletionChoice(
            index=answer.index,
            text=answer.prompt.echo + "".join(answer.texts),
            logprobs=self._logprobs(running, answer),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if with_ids else None,
            prompt_token_ids=answer.prompt.token_ids if with_ids else None,
            prompt_logprobs=None if top is None else self.form.prompt(_entries(running, answer)),
        )

    def _legacy(self, answer: Answer) -> LegacyLogprobs:
        return LegacyLogprobs(self.form, answer.prompt, echo=self.body.echo)

    def _logprobs(self, running: Generation, answer: Answer) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        legacy = self._legacy(answer)
        parts = [self._prompt_part(running, answer, legacy)] if self.body.echo else []
        return join([*parts, legacy.output(answer.logprobs)])

    def _prompt_part(
        self, running: Generation, answer: Answer, legacy: LegacyLogprobs
    ) -> dict[str, Any]:
        """Logprobs of the echoed prompt."""
        return legacy.prompt(_entries(running, answer))

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: Usage | None,
        warnings: list[str] | None = None,
    ) -> Completion:
        return Completion(
            id=self.call.id,
            object="text_completion",
            created=self.call.created,
            model=self.call.model,
            system_fingerprint=self.call.fingerprint,
            adapter_generation=self.call.target.generation,
            choices=choices,
            usage=usage,
            warnings=warnings,
        )

    async def blocks(self) -> AsyncGenerator[bytes]:
        """The choices as events: echo if asked for, deltas, usage if asked for, end."""
        options = self.body.stream_options
        every_usage = options is not None and options.continuous_usage_stats
        begun: dict[int, LegacyLogprobs] = {}
        async with self._generation() as running, aclosing(running.events()) as events:
            async for answer, event in events:
                legacy = begun.get(answer.index)
                first = legacy is None
                if legacy is None:
                    legacy = begun[answer.index] = self._legacy(answer)
                    if self.body.echo:
                        yield await self._echo_block(running, answer, legacy, every_usage)
                choice = self._delta(answer, event, legacy, with_prompt=first)
                if choice is not None:
                    usage = running.usage if every_usage else None
                    warnings = running.warnings if first else None
                    yield event_block(self._completion([choice], usage, warnings))
            if options is not None and options.include_usage:
                yield event_block(self._completion([], running.usage))
        yield DONE

    async def _echo_block(
        self, running: Generation, answer: Answer, legacy: LegacyLogprobs, every_usage: bool
    ) -> bytes:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = await self.context.in_pool(self._prompt_part, running, answer, legacy)
        choice = CompletionChoice(
            index=answer.index, text=answer.prompt.echo, logprobs=logprobs, finish_reason=None
        )
        return event_block(self._completion([choice], running.usage if every_usage else None))

    def _delta(
        self, answer: Answer, event: Event, legacy: LegacyLogprobs, *, with_prompt: bool
    ) -> CompletionChoice | None:
        """What the event adds; None where that is nothing a client can see."""
        with_ids = self.body.return_token_ids and (bool(event.token_ids) or with_prompt)
        with_logprobs = self.body.logprobs is not None and bool(event.logprobs)
        if not (event.text or with_logprobs or with_ids or event.finish_reason):
            return None
        return CompletionChoice(
            index=answer.index,
            text=event.text,
            logprobs=legacy.output(event.logprobs) if with_logprobs else None,
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=list(event.token_ids) if with_ids else None,
            prompt_token_ids=answer.prompt.token_ids if with_ids and with_prompt else None,
        )


def _entries(running: Generation, answer: Answer) -> tuple[TokenLogprobs, ...]:
    entries = running.prompt_logprobs[answer.prompt_index]
    if entries is None:
        raise InternalError("the engine gave no log-probabilities of the prompt")
    return entries
