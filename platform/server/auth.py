"""API keys: every path needs one, except the few that are open. Decided on `scope["path"]`."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.platform.errors import Unauthorized
from plait.platform.server.errors import error_response

if TYPE_CHECKING:
    from plait.platform.server.settings import ServerSettings

OPEN_PATHS = frozenset({"/health", "/ready"})


class Auth:
    """Refuses requests without a key; without configured keys everyone may come in."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in settings.api_keys]
        paths = OPEN_PATHS | ({"/metrics"} if settings.metrics_public else set())
        self._open = {settings.root_path.rstrip("/") + path for path in paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with 401."""
        if scope["type"] == "lifespan" or not self._digests:
            await self._app(scope, receive, send)
            return
        digest = self._matching(_key(scope))
        if digest is None and scope["path"] not in self._open:
            error = Unauthorized(
                "missing or wrong API key: send it as 'Authorization: Bearer KEY' or 'X-Api-Key'"
            )
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["key_digest"] = digest or ""
        await self._app(scope, receive, send)

    def _matching(self, key: bytes) -> str | None:
        """The digest of the configured key that `key` is; takes the same time for any."""
        given, found = _digest(key), None
        for digest in self._digests:
            if secrets.compare_digest(digest, given):
                found = digest
        return found


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _key(scope: Scope) -> bytes:
    """The key as sent: bytes, since header values need not be text."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key", b"").strip()
