"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait.platform.core import Event, SamplingParams
from plait.platform.errors import BadRequest
from plait.platform.server import prompts
from plait.platform.server.adapters.defaults import with_defaults
from plait.platform.server.call import Call, begin
from plait.platform.server.generation import Answer, Generation, generation
from plait.platform.server.logprobs import LogprobsFormat
from plait.platform.server.openapi import takes
from plait.platform.server.params import chat_params
from plait.platform.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    Completion,
    Delta,
    Message,
    encode,
)
from plait.platform.server.schemas import ChatCompletionRequest
from plait.platform.server.seeing import ChatImages
from plait.platform.server.streaming import DONE, EventStream, event_block, until_disconnected
from plait.platform.server.structured.replies import Reading, constraint_of
from plait.structured.reply import ReplyPlan
from plait.structured.tools.request import read_tools

if TYPE_CHECKING:
    from plait.platform.server.context import ServerContext
    from plait.structured.tools.request import ToolWish


def chat_router(context: ServerContext) -> APIRouter:
    """Routes of this family."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=takes(ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a chat; with `stream`, as server-sent events."""
        body = await context.read(request, ChatCompletionRequest)
        with ExitStack() as held:
            call = await begin(
                context, request, body, held, prefix="chatcmpl", prompt_param="messages"
            )
            chat = _prepare(context, call, with_defaults(body, call.target.bundle))
            if body.stream:
                on_end = held.pop_all().close
                return EventStream(chat.blocks(), context.settings, call.request_id, on_end)
            return await until_disconnected(request.receive, chat.answer())

    return router


def _prepare(context: ServerContext, call: Call, body: ChatCompletionRequest) -> _Chat:
    params = chat_params(body, context.settings.limits)
    images = ChatImages.of(context, body)
    images.refuse_truncation(body.truncate_prompt_tokens)
    wish = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    plan = ReplyPlan.of(call.target.tokenizer, constraint_of(body), wish)
    if plan is not None and plan.shows_special:
        params = replace(params, skip_special_tokens=False)
    if body.echo and not body.continue_final_message:
        raise BadRequest(
            "echo repeats the message that is continued: it needs continue_final_message: true",
            param="echo",
        )
    tokenizer = call.target.tokenizer
    form = LogprobsFormat(tokenizer, params, as_ids=body.return_tokens_as_token_ids)
    return _Chat(
        context=context,
        call=call,
        body=body,
        params=params,
        messages=images.messages,
        images=images,
        form=form,
        wish=wish if wish is not None and wish.callable else None,
        plan=plan,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    """One chat request, checked."""

    context: ServerContext
    call: Call
    body: ChatCompletionRequest
    params: SamplingParams
    messages: list[dict[str, Any]]
    images: ChatImages
    form: LogprobsFormat
    wish: ToolWish | None  # tools that the prompt shows
    plan: ReplyPlan | None  # None: the reply is free

    @asynccontextmanager
    async def _generation(self) -> AsyncIterator[Generation]:
        plan = self.plan
        constrain = None if plan is None else lambda prompt: plan.grammar(prompt.begins)
        run = generation(
            self.context, self.call, self.params, 1, self._prompts, constrain, self._see
        )
        with self.images.held:
            async with run as running:
                if plan is not None:
                    for answer in running.answers:
                        answer.reading = Reading(plan.parser(answer.prompt.begins))
                yield running

    async def _see(self, room: int) -> None:
        await self.images.see(room, self.call.cache_salt, self.call.time_left_s)

    def _prompts(self, room: int) -> list[prompts.Prompt]:
        tokenizer = self.call.target.tokenizer
        shown = self.images.shown(tokenizer, with_tools=self.wish is not None)
        text = prompts.render_chat(tokenizer, shown, self.body, self.wish)
        begins = False if self.plan is None else self.plan.begins(tokenizer, text)
        ids, images = self.images.encode(tokenizer, text, self.body)
        echo = prompts.final_text(self.messages) if self.body.echo else ""
        kept = prompts.truncate(ids, self.body.truncate_prompt_tokens, room)
        return [prompts.Prompt(token_ids=kept, echo=echo, begins=begins, images=images)]

    async def answer(self) -> Response:
        """The whole answer in one body."""
        async with self._generation() as running:
            async with aclosing(running.events()) as events:
                async for answer, event in events:
                    if answer.reading is not None:
                        answer.reading.take(event)
            if self.params.logprobs is None and self.params.prompt_logprobs is None:
                content = self._encode(running)
            else:
                content = await self.context.in_pool(self._encode, running)
        return Response(content, media_type="application/json")

    def _encode(self, running: Generation) -> bytes:
        prompt_ids = running.prompts[0].token_ids if self.body.return_token_ids else None
        entries = running.prompt_logprobs[0]
        return encode(
            Completion(
                id=self.call.id,
                object="chat.completion",
                created=self.call.created,
                model=self.call.model,
                system_fingerprint=self.call.fingerprint,
                adapter_generation=self.call.target.generation,
                choices=[self._choice(answer) for answer in running.answers],
                usage=running.usage,
                prompt_token_ids=prompt_ids,
                warnings=running.warnings,
                prompt_logprobs=None if entries is None else self.form.prompt(entries),
            )
        )

    def _choice(self, answer: Answer) -> ChatChoice:
        return ChatChoice(
            index=answer.index,
            message=_message(answer),
            logprobs=self.form.chat(answer.logprobs) if self.body.logprobs else None,
            finish_reason=_finish_reason(answer),
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if self.body.return_token_ids else None,
        )

    async def blocks(self) -> AsyncGenerator[bytes]:
        """The answer as events: role, deltas, finish, usage if asked for, end."""
        options = self.body.stream_options
        every_usage = options is not None and options.continuous_usage_stats
        begun: set[int] = set()
        async with self._generation() as running, aclosing(running.events()) as events:
            async for answer, event in events:
                if answer.index not in begun:
                    begun.add(answer.index)
                    for choice in self._opening(answer):
                        yield self._chunk(running, choice, every_usage, first=len(begun) == 1)
                for choice in self._deltas(answer, event):
                    yield self._chunk(running, choice, every_usage)
            if options is not None and options.include_usage:
                yield self._chunk(running, None, usage=True)
        yield DONE

    def _opening(self, answer: Answer) -> list[ChatChunkChoice]:
        """The role alone; then the continued message, where it is echoed."""
        deltas = [Delta(role="assistant")]
        if answer.prompt.echo:
            deltas.append(Delta(content=answer.prompt.echo))
        return [
            ChatChunkChoice(index=answer.index, delta=d, logprobs=None, finish_reason=None)
            for d in deltas
        ]

    def _deltas(self, answer: Answer, event: Event) -> list[ChatChunkChoice]:
        """What the event adds, if that is anything a client can see."""
        wants_logprobs = self.body.logprobs and bool(event.logprobs)
        wants_ids = self.body.return_token_ids and bool(event.token_ids)
        if answer.reading is None:
            deltas = [Delta(content=event.text)] if event.text else []
        else:
            deltas = answer.reading.take(event)
        if not deltas and (wants_logprobs or wants_ids or event.finish_reason):
            deltas = [Delta(content="" if wants_logprobs or wants_ids else None)]
        choices = [
            ChatChunkChoice(index=answer.index, delta=d, logprobs=None, finish_reason=None)
            for d in deltas
        ]
        if choices:
            last = choices[-1]
            last.logprobs = self.form.chat(event.logprobs) if wants_logprobs else None
            last.finish_reason = _finish_reason(answer)
            last.stop_reason = answer.stop_reason
            last.token_ids = list(event.token_ids) if wants_ids else None
        return choices

    def _chunk(
        self,
        running: Generation,
        choice: ChatChunkChoice | None,
        usage: bool,
        *,
        first: bool = False,
    ) -> bytes:
        wants_prompt = first and self.body.return_token_ids and choice is not None
        return event_block(
            Completion(
                id=self.call.id,
                object="chat.completion.chunk",
                created=self.call.created,
                model=self.call.model,
                system_fingerprint=self.call.fingerprint,
                adapter_generation=self.call.target.generation,
                choices=[] if choice is None else [choice],
                usage=running.usage if usage else None,
                prompt_token_ids=running.prompts[0].token_ids if wants_prompt else None,
                warnings=running.warnings if first else None,
            )
        )


def _message(answer: Answer) -> Message:
    reading = answer.reading
    if reading is None:
        return Message(content=answer.prompt.echo + "".join(answer.texts))
    reply = reading.reply
    content = answer.prompt.echo + reply.content
    return Message(
        content=content if content or not reply.calls else None,
        reasoning_content=reply.reasoning or msgspec.UNSET,
        tool_calls=reading.calls or msgspec.UNSET,
    )


def _finish_reason(answer: Answer) -> str | None:
    reading = answer.reading
    return answer.finish_reason if reading is None else reading.finish_reason(answer.finish_reason)
