"""The outermost layer: request ids, one log line per request, HTTP metrics, the last resort.

Pure ASGI, like all layers here: a wrapped response would hide disconnects and hold back chunks.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.platform.server.access import Access
from plait.platform.server.errors import as_plait_error, error_response
from plait.platform.server.params import valid_request_id
from plait.platform.server.streaming import ClientDisconnected

if TYPE_CHECKING:
    from plait.platform.server.metrics import Metrics

log = logging.getLogger("plait.server.requests")

REQUEST_ID_HEADER = "x-request-id"
CLIENT_CLOSED = 499  # nginx's code for a client that went away
_QUIET = frozenset({"/health", "/ready", "/metrics"})
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class RequestScope:
    """Gives each request its id and state; turns what escapes into a clean 500."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, log_requests: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request and account for it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(scope)
        state["arrival_s"] = time.monotonic()
        state["key_digest"] = ""
        state["access"] = Access()
        state["tokens"] = None
        state["refused_at"] = None  # the route whose gate refused it, before any work
        response = _Response(send, state)
        try:
            await self._app(scope, receive, response.send)
        except ClientDisconnected:
            response.status = CLIENT_CLOSED
        except Exception as error:  # noqa: BLE001 - logged, and shown as a clean 500
            shown = as_plait_error(error, state["request_id"])
            if not response.started:
                await error_response(shown)(scope, receive, response.send)
        finally:
            self._account(scope, state, response.status)

    def _account(self, scope: Scope, state: dict[str, Any], status: int) -> None:
        seconds = time.monotonic() - state["arrival_s"]
        refused_at = state["refused_at"]
        handler = refused_at or getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http_requests.labels(handler, method, str(status)).inc()
        self._metrics.http_seconds.labels(handler, method).observe(seconds)
        if not self._log_requests or refused_at or scope["path"] in _QUIET:
            return  # refusals come in floods; the gate tells of them together
        tokens = state["tokens"]
        counts = "" if tokens is None else f" prompt={tokens[0]} output={tokens[1]}"
        log.info(
            "%s %s %s %d%s %.3fs",
            state["request_id"],
            method,
            handler if handler != "unmatched" else ascii(scope["path"])[:120],
            status,
            counts,
            seconds,
        )


class _Response:
    """Watches a response on its way out, and puts the request's id into its head."""

    def __init__(self, send: Send, state: dict[str, Any]) -> None:
        self._send = send
        self._state = state
        self.started = False
        self.status = CLIENT_CLOSED  # until a head is sent

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID_HEADER] = self._state["request_id"]
        await self._send(message)


def _request_id(scope: Scope) -> str:
    """The client's id where it is fit for logs and headers, else a new one."""
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if valid_request_id(given) else uuid.uuid4().hex
