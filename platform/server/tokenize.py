"""/tokenize and /detokenize."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait.platform.errors import BadRequest
from plait.platform.server import prompts
from plait.platform.server.adapters.resolve import resolve
from plait.platform.server.context import cache_salt
from plait.platform.server.openapi import takes
from plait.platform.server.responses import Tokens, encode
from plait.platform.server.schemas import ChatTemplating, DetokenizeRequest, TokenizeRequest
from plait.platform.server.seeing import ChatImages

if TYPE_CHECKING:
    from plait.platform.server.adapters.resolve import Target
    from plait.platform.server.context import ServerContext
    from plait.platform.text.tokenizer import Tokenizer


def tokenize_router(context: ServerContext) -> APIRouter:
    """Routes of this family."""
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of a chat as its template renders it."""
        body = await context.read(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        with ExitStack() as held:
            target = await resolve(context, body, request.state.access, held)
            images = None
            if body.messages is not None:
                images = ChatImages.of(context, _chat(body))
                held.enter_context(images.held)
                await images.see(
                    context.admission.config().scheduler.max_model_len,
                    cache_salt(request.state.access.key_digest, None),
                )
            content = await context.in_pool(_tokenize, context, body, target.tokenizer, images)
        return Response(content, media_type="application/json")

    @router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        body = await context.read(request, DetokenizeRequest)
        with ExitStack() as held:
            target = await resolve(context, body, request.state.access, held)
            content = await context.in_pool(_detokenize, context, body, target)
        return Response(content, media_type="application/json")

    return router


def _tokenize(
    context: ServerContext,
    body: TokenizeRequest,
    tokenizer: Tokenizer,
    images: ChatImages | None,
) -> bytes:
    if images is not None:
        chat = _chat(body)
        text = prompts.render_chat(tokenizer, images.shown(tokenizer), chat)
        ids, _ = images.encode(tokenizer, text, chat)
    else:
        special = body.add_special_tokens
        ids = tokenizer.encode(body.prompt or "", add_special_tokens=special is not False)
    texts = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    max_model_len = context.admission.config().scheduler.max_model_len
    return encode(Tokens(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=texts))


def _chat(body: TokenizeRequest) -> ChatTemplating:
    return ChatTemplating(
        messages=body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens or False,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _detokenize(context: ServerContext, body: DetokenizeRequest, target: Target) -> bytes:
    vocab_size = max(target.vocab_size, context.admission.config().model.vocab_size)
    wrong = next((i for i in body.tokens if i >= vocab_size), None)
    if wrong is not None:
        raise BadRequest(
            f"tokens: {wrong} is outside the vocabulary of {vocab_size}", param="tokens"
        )
    text = target.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
    return encode({"prompt": text})
