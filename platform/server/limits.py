"""Bounds on the HTTP message itself, before anything looks at what it says."""

from __future__ import annotations

import asyncio
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
    from plait.platform.server.settings import Limits

_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class BodyLimits:
    """Reads the whole body within its bounds, then hands it on in one message."""

    def __init__(self, app: ASGIApp, *, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass with its body read, or answer it with the bound it breaks."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
            body = await self._read(receive)
        except PlaitError as error:
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_headers(self, scope: Scope) -> None:
        limits, fields = self._limits, scope["headers"]
        num_bytes = sum(len(name) + len(value) + 4 for name, value in fields)
        if len(fields) > limits.header_fields or num_bytes > limits.header_bytes:
            raise HeadersTooLarge(
                f"the header has {len(fields)} fields and {num_bytes} bytes; at most "
                f"{limits.header_fields} fields and {limits.header_bytes} bytes are taken"
            )
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > limits.body_bytes:
            raise self._too_large()
        if scope["method"] in _METHODS_WITH_BODY:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise WrongContentType("send the body as Content-Type: application/json")

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._limits.body_bytes} bytes")

    async def _read(self, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                return await self._read_all(receive)
        except TimeoutError:
            raise DeadlineExceeded("the body took too long to arrive") from None

    async def _read_all(self, receive: Receive) -> bytes:
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part = message.get("body", b"")
            size += len(part)
            if size > self._limits.body_bytes:
                raise self._too_large()
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
