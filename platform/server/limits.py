"""Bounds on the HTTP message itself, before anything looks at what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.platform.errors import DeadlineExceeded, PlaitError
from plait.platform.server.errors import (
    BodyTooLarge,
    HeadersTooLarge,
    WrongContentType,
    error_response,
)
from plait.platform.server.streaming import ClientDisconnected

if TYPE_CHECKING:
    from plait.platform.server.settings import ServerSettings

_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class BodyLimits:
    """Reads the whole body within its bounds, then hands it on in one message."""

    def __init__(
        self, app: ASGIApp, *, settings: ServerSettings, takes_images: Callable[[], bool]
    ) -> None:
        self._app = app
        self._takes_images = takes_images
        self._settings = settings
        self._limits = settings.limits
        self._root = settings.root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass with its body read, or answer it with the bound it breaks."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            path = scope["path"].removeprefix(self._root)
            bound = self._settings.body_bytes(path, takes_images=self._takes_images())
            self._check_headers(scope, bound)
            if scope["method"] in _METHODS_WITH_BODY:
                _check_type(scope, takes_tensors=self._settings.takes_tensors(path))
            body = await self._read(receive, bound)
        except PlaitError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_headers(self, scope: Scope, body_bytes: int) -> None:
        limits, fields = self._limits, scope["headers"]
        num_bytes = sum(len(name) + len(value) + 4 for name, value in fields)
        if len(fields) > limits.header_fields or num_bytes > limits.header_bytes:
            raise HeadersTooLarge(
                f"the header has {len(fields)} fields and {num_bytes} bytes; at most "
                f"{limits.header_fields} fields and {limits.header_bytes} bytes are taken"
            )
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > body_bytes:
            raise _too_large(body_bytes)

    async def _read(self, receive: Receive, bound: int) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await _read_all(receive, bound)
        except TimeoutError:
            raise DeadlineExceeded("the body took too long to arrive") from None


def _check_type(scope: Scope, *, takes_tensors: bool) -> None:
    wanted = "application/octet-stream" if takes_tensors else "application/json"
    headers = Headers(scope=scope)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != wanted:
        raise WrongContentType(f"send the body as Content-Type: {wanted}")
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise WrongContentType(f"send the body as it is, without Content-Encoding: {encoding[:32]}")


def _too_large(bound: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {bound} bytes")


async def _read_all(receive: Receive, bound: int) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > bound:
            raise _too_large(bound)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the whole body first, then what the connection says."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
