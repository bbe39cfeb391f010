"""One generation call over HTTP: who asks, under which id, until when."""

from __future__ import annotations

import math
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest

from plait.platform.core import Speculation
from plait.platform.errors import BadRequest, DeadlineExceeded
from plait.platform.server.adapters.resolve import Target, resolve
from plait.platform.server.context import cache_salt
from plait.platform.server.params import valid_request_id

if TYPE_CHECKING:
    from plait.platform.server.context import ServerContext
    from plait.platform.server.responses import Usage
    from plait.platform.server.schemas import GenerationRequest, SpeculationWish

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a chat or completion request is, apart from its prompt and parameters."""

    http: HttpRequest
    id: str  # `chatcmpl-…` or `cmpl-…`
    unique: str  # a client may send one request_id twice; the engine sees this in its ids
    created: int
    arrival_s: float  # monotonic
    timeout_s: float | None
    target: Target
    fingerprint: str
    priority: int
    speculation: Speculation
    cache_salt: str
    prompt_param: str  # the field that holds the prompt, for errors
    tenant: str  # digest of the key
    share: float

    @property
    def model(self) -> str:
        """The model as the client named it."""
        return self.target.model

    def time_left_s(self) -> float | None:
        """Seconds to the deadline, None without one. Raises `DeadlineExceeded` past it."""
        return _time_left_s(self.arrival_s, self.timeout_s)

    def engine_request_id(self, index: int) -> str:
        """The id of one prompt's engine request."""
        return f"{self.id}-{self.unique}-{index}"

    @property
    def request_id(self) -> str:
        """The id in logs and in X-Request-Id."""
        return str(self.http.state.request_id)

    def log_usage(self, usage: Usage) -> None:
        """Leave the token counts for the request's log line."""
        self.http.state.tokens = (usage.prompt_tokens, usage.completion_tokens)


async def begin(
    context: ServerContext,
    http: HttpRequest,
    body: GenerationRequest,
    held: ExitStack,
    *,
    prefix: str,
    prompt_param: str,
) -> Call:
    """Check what all generation requests share; `held` keeps their adapters until it is closed.

    Raises `ModelNotFound`, `BadRequest`.
    """
    if body.request_id is not None:
        http.state.request_id = _checked_id(body.request_id)
    arrival_s, timeout_s = http.state.arrival_s, _timeout_s(http, body.timeout)
    access = http.state.access
    target = await resolve(
        context, body, access, held, time_left_s=lambda: _time_left_s(arrival_s, timeout_s)
    )
    return Call(
        http=http,
        id=f"{prefix}-{http.state.request_id}",
        unique=uuid.uuid4().hex[:12],
        created=int(time.time()),
        arrival_s=arrival_s,
        timeout_s=timeout_s,
        target=target,
        fingerprint=context.fingerprint,
        priority=body.priority,
        speculation=_speculation(body.speculation),
        prompt_param=prompt_param,
        cache_salt=cache_salt(access.key_digest, body.cache_salt),
        tenant=access.key_digest,
        share=access.weight,
    )


def _speculation(wish: SpeculationWish | None) -> Speculation:
    """Raises `InvalidParameter`."""
    if wish is None:
        return Speculation()
    return Speculation(enabled=wish.enabled, max_tokens=wish.max_tokens)


def _time_left_s(arrival_s: float, timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    left = arrival_s + timeout_s - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"the request's timeout of {timeout_s:g} s has passed")
    return left


def _checked_id(request_id: str) -> str:
    """It goes into a header and the log, so nothing else of it may be used before."""
    if not valid_request_id(request_id):
        raise BadRequest("request_id takes 1 to 128 letters, digits and ._:-", param="request_id")
    return request_id


def _timeout_s(http: HttpRequest, wish: float | None) -> float | None:
    """The shorter of the header's and the body's wish."""
    wishes = [] if wish is None else [_checked(wish, "timeout")]
    header = http.headers.get(TIMEOUT_HEADER)
    if header is not None:
        try:
            wishes.append(_checked(float(header), TIMEOUT_HEADER))
        except ValueError:
            raise BadRequest(
                f"{TIMEOUT_HEADER} must be a number of seconds", param=TIMEOUT_HEADER
            ) from None
    return min(wishes, default=None)


def _checked(timeout_s: float, param: str) -> float:
    if not math.isfinite(timeout_s) or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise BadRequest(
            f"{param} must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds", param=param
        )
    return timeout_s
