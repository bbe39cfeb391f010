"""The first thing a full server does with a request for an answer: refuse it, unread.

Under overload most requests are refused, so a refusal must cost next to nothing: this layer stands
before the body is read, let alone parsed. What passes is counted exactly in generation.py.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.platform.errors import Overloaded
from plait.platform.server.errors import error_response

if TYPE_CHECKING:
    from plait.platform.server.context import ServerContext

log = logging.getLogger("plait.server.requests")

_REPORT_S = 1.0  # between two lines about refusals
_PATHS = ("/v1/chat/completions", "/v1/completions")


class Gate:
    """Answers 503 while there is no place for even one more request."""

    def __init__(self, app: ASGIApp, *, context: ServerContext) -> None:
        self._app = app
        self._context = context
        root = context.settings.root_path.rstrip("/")
        self._paths = {root + path: path for path in _PATHS}
        self._num_refused = 0  # since the last line
        self._reported_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or refuse it."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths:
            try:
                self._context.admission.check(1)
            except Overloaded as error:
                self._context.count_rejection()
                self._report(error)
                scope["state"]["refused_at"] = self._paths[scope["path"]]
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _report(self, error: Overloaded) -> None:
        """One line for all refusals of a while: a line each would cost more than the refusals."""
        self._num_refused += 1
        now = time.monotonic()
        if now - self._reported_s >= _REPORT_S and self._context.settings.log_requests:
            log.warning("refused %d requests with 503: %s", self._num_refused, error.message)
            self._num_refused, self._reported_s = 0, now
