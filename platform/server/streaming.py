"""Server-sent events: framing, silence, errors, and clients that go away.

A stream is `data: {json}` blocks, then `data: [DONE]`; or, where it fails, one
`data: {"error": {…}}` as its last block (no `[DONE]`: the answer is not complete). An error
that comes within the first moments, before anything was sent, gets its own HTTP status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.platform.errors import PlaitError
from plait.platform.server.errors import as_plait_error, error_body
from plait.platform.server.responses import encode
from plait.platform.server.settings import ServerSettings

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class ClientDisconnected(Exception):
    """The client went away; nobody reads what would be sent."""


def event_block(payload: Any) -> bytes:
    """One event of the stream."""
    return b"data: " + encode(payload) + b"\n\n"


async def until_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled once the client goes away.

    The request's body must have been read. Raises `ClientDisconnected`.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends blocks as they come, a comment in long silence, and an error as the last event.

    `on_end` is called once, whether all, a part or nothing of it was sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        blocks: AsyncGenerator[bytes],
        settings: ServerSettings,
        request_id: str,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._blocks = blocks
        self._settings = settings
        self._request_id = request_id
        self._on_end = on_end

    def init_headers(self, headers: Any = None) -> None:
        """Headers without a length, which `Response` would derive from an empty body."""
        super().init_headers(headers)
        del self.headers["content-length"]

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - ASGI's signature
        receive: Receive,
        send: Send,
    ) -> None:
        """Send everything, or stop once the client goes away."""
        writer = _Writer(send, {"status": self.status_code, "headers": self.raw_headers})
        try:
            await until_disconnected(receive, self._run(writer))
        finally:
            self._on_end()

    async def _run(self, writer: _Writer) -> None:
        ticker = asyncio.ensure_future(
            writer.tick(self._settings.header_delay_s, self._settings.keep_alive_interval_s)
        )
        try:
            async with aclosing(self._blocks) as blocks:
                async for block in blocks:
                    await writer.write(block)
        except Exception as error:
            if not writer.started:
                raise
            await writer.write(self._error_block(error))
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        await writer.end()

    def _error_block(self, error: Exception) -> bytes:
        shown: PlaitError = as_plait_error(error, self._request_id)
        return event_block(error_body(shown))


class _Writer:
    """The sending half of one response; its lock keeps comments out of the midst of blocks."""

    def __init__(self, send: Send, start: dict[str, Any]) -> None:
        self._send = send
        self._start = start
        self._lock = asyncio.Lock()
        self._last_s = 0.0  # when something was last sent, on the loop's clock
        self.started = False

    async def write(self, block: bytes) -> None:
        async with self._lock:
            await self._send_start()
            self._last_s = asyncio.get_running_loop().time()
            await self._send({"type": "http.response.body", "body": block, "more_body": True})

    async def end(self) -> None:
        async with self._lock:
            await self._send_start()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def tick(self, header_delay_s: float, interval_s: float) -> None:
        """Send the headers after a while, then a comment after each silent interval."""
        await asyncio.sleep(header_delay_s)
        async with self._lock:
            await self._send_start()
        self._last_s = self._last_s or asyncio.get_running_loop().time()
        while interval_s > 0:
            silent_s = asyncio.get_running_loop().time() - self._last_s
            if silent_s >= interval_s:
                await self.write(KEEP_ALIVE)
            else:
                await asyncio.sleep(interval_s - silent_s)

    async def _send_start(self) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", **self._start})
