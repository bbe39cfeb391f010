"""API keys: every path needs one, except the few that are open. Decided on `scope["path"]`.

What changes the server's adapters needs the admin key, and nothing of it is read before.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.platform.errors import Unauthorized
from plait.platform.server.access import Access, Grant
from plait.platform.server.errors import error_response
from plait.platform.server.settings import ADMIN_PATHS

if TYPE_CHECKING:
    from plait.platform.server.settings import ServerSettings

OPEN_PATHS = frozenset({"/health", "/ready"})


class Auth:
    """Refuses requests without a key; without configured keys everyone may come in."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        grants = [*(Grant(key=key) for key in settings.api_keys), *settings.grants]
        self._is_open = not grants
        self._access = [_access(grant) for grant in grants]
        admin_paths = frozenset[str]()
        if settings.admin_key is not None:
            admin = Access(key_digest=_digest(settings.admin_key.encode()), is_admin=True)
            self._access.append(admin)
            admin_paths = ADMIN_PATHS
        root = settings.root_path.rstrip("/")
        paths = OPEN_PATHS | ({"/metrics"} if settings.metrics_public else set())
        self._open_paths = {root + path for path in paths}
        self._admin_paths = {root + path for path in admin_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with 401."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        access = self._matching(_key(scope))
        error = self._refusal(scope["path"], access)
        if error is not None:
            await error_response(error)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["access"] = access or Access()
        state["key_digest"] = state["access"].key_digest
        await self._app(scope, receive, send)

    def _refusal(self, path: str, access: Access | None) -> Unauthorized | None:
        if path in self._admin_paths:
            if access is None or not access.is_admin:
                return needs_admin_key()
        elif access is None and not self._is_open and path not in self._open_paths:
            return Unauthorized(
                "missing or wrong API key: send it as 'Authorization: Bearer KEY' or 'X-Api-Key'"
            )
        return None

    def _matching(self, key: bytes) -> Access | None:
        """What the configured key that `key` is allows; takes the same time for any."""
        if not self._access:
            return None
        given, found = _digest(key), None
        for access in self._access:
            if secrets.compare_digest(access.key_digest, given):
                found = access
        return found


def needs_admin_key() -> Unauthorized:
    """What is said to others than the admin."""
    return Unauthorized("this needs the admin key: send it as an API key is sent")


def _access(grant: Grant) -> Access:
    return Access(
        key_digest=_digest(grant.key.encode()), adapters=grant.adapters, weight=grant.weight
    )


def _digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def _key(scope: Scope) -> bytes:
    """The key as sent: bytes, since header values need not be text."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key", b"").strip()
