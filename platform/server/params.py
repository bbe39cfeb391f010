"""From a request's fields to `SamplingParams`, with the bounds of this server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from plait.platform.core import SamplingParams
from plait.platform.errors import BadRequest, Unsupported

if TYPE_CHECKING:
    from plait.platform.server.schemas import (
        ChatCompletionRequest,
        CompletionRequest,
        GenerationRequest,
    )
    from plait.platform.server.settings import Limits

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for /v1/completions; chats go on to the context's end
_TOKEN_ID = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
# Fields that mean the same in a request and in `SamplingParams`.
_SAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def valid_request_id(text: str) -> bool:
    """Whether a client's id is fit for logs and headers."""
    return _REQUEST_ID.match(text) is not None


def chat_params(body: ChatCompletionRequest, limits: Limits) -> SamplingParams:
    """Raises `BadRequest` naming the field at fault, `InvalidParameter` from the ranges."""
    _check_common(body, limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    wanted = {t for t in (body.max_tokens, body.max_completion_tokens) if t is not None}
    if len(wanted) > 1:
        raise BadRequest(
            "max_tokens and max_completion_tokens differ; give max_completion_tokens alone",
            param="max_tokens",
        )
    max_tokens = next(iter(wanted), None)
    if max_tokens is not None and max_tokens < 1:
        named = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise BadRequest(f"{named} must be at least 1", param=named)
    _at_most("top_logprobs", body.top_logprobs, limits.logprobs)
    return SamplingParams(
        **_same(body),
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def completion_params(body: CompletionRequest, limits: Limits) -> SamplingParams:
    """Raises `BadRequest` naming the field at fault, `InvalidParameter` from the ranges."""
    _check_common(body, limits)
    if body.suffix:
        raise Unsupported("suffix is not served: put everything into prompt", param="suffix")
    _at_most("logprobs", body.logprobs, limits.logprobs)
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    prompt_logprobs = max((top for top in wanted if top is not None), default=None)
    return SamplingParams(
        **_same(body),
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _same(body: GenerationRequest) -> dict[str, Any]:
    fields = {name: getattr(body, name) for name in _SAME}
    # The engine's seeds are 64 bit without a sign; OpenAI's may be negative.
    seed = None if body.seed is None else body.seed % (1 << 64)
    return fields | {"seed": seed, "logit_bias": _logit_bias(body.logit_bias)}


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, bias in biases.items():
        # Written one way, so that no token has two biases of which one is dropped.
        if not _TOKEN_ID.match(token):
            raise BadRequest(f"logit_bias: {token[:32]!r} is not a token id", param="logit_bias")
        found[int(token)] = bias
    return found


def _check_common(body: GenerationRequest, limits: Limits) -> None:
    """Bounds, combinations that cannot hold, and what is not served."""
    _at_most("n", body.n, limits.n)
    _at_most("prompt_logprobs", body.prompt_logprobs, limits.logprobs)
    if not -limits.priority <= body.priority <= limits.priority:
        raise BadRequest(
            f"priority must lie in [-{limits.priority}, {limits.priority}]", param="priority"
        )
    if body.best_of is not None and body.best_of != body.n:
        raise Unsupported("best_of is served only equal to n; ask for n answers", param="best_of")
    if body.use_beam_search:
        raise Unsupported(
            "use_beam_search: beam search is not served; use n", param="use_beam_search"
        )
    _check_stream(body)
    if body.cache_salt is not None and not body.cache_salt:
        raise BadRequest("cache_salt is empty: leave it out", param="cache_salt")


def _check_stream(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequest(
            "prompt_logprobs come only without stream (in /v1/completions, echo with logprobs "
            "streams them)",
            param="prompt_logprobs",
        )


def _at_most(name: str, value: int | None, bound: int) -> None:
    if value is not None and value > bound:
        raise BadRequest(f"{name}: {value} is over the limit of {bound}", param=name)
