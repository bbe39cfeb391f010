"""Serving to the end: signals, the drain, and the way out.

First SIGTERM, SIGINT or SIGHUP: /ready and new requests say 503 at once, running requests go on up
to the shutdown timeout, the rest is aborted, and the process ends. A second signal ends it
immediately. A SIGHUP that is ignored, as under nohup, stays so.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from plait.platform.server.connection import connection_class

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

    from plait.platform.server.context import ServerContext
    from plait.platform.server.settings import ServerSettings

log = logging.getLogger("plait.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEP_ALIVE_S = 75  # longer than proxies keep an idle connection, so that they close it first
_LAST_WRITES_S = 5  # for responses that were aborted to be sent


def run(app: FastAPI, settings: ServerSettings) -> None:
    """Serve until a signal, in an event loop of its own."""
    with asyncio.Runner(loop_factory=_config(app, settings).get_loop_factory()) as runner:
        runner.run(serve(app, settings))


async def serve(
    app: FastAPI, settings: ServerSettings, *, sockets: list[socket.socket] | None = None
) -> None:
    """Serve until a signal, on the running loop. Closes the engine's client at the end.

    `sockets` are bound ones to listen on, in place of the settings' address.
    """
    await _Server(_config(app, settings), app.state.context).serve(sockets)


def _config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        uds=settings.uds,
        root_path=settings.root_path,
        http=connection_class(settings),
        timeout_keep_alive=_KEEP_ALIVE_S,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_WRITES_S,
    )


def _handled() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [*_SIGNALS] if ignored else [*_SIGNALS, signal.SIGHUP]


class _Server(uvicorn.Server):
    """uvicorn's server with a drain between the signal and the end."""

    def __init__(self, config: uvicorn.Config, context: ServerContext) -> None:
        super().__init__(config)
        self._context = context
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; unlike uvicorn's, a drained end is a clean exit."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._loop = asyncio.get_running_loop()
        before = {number: signal.signal(number, self.handle_exit) for number in _handled()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Begin the drain; a second signal ends everything now."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """What a signal does, on the event loop."""
        if self._drain is None:
            self._context.admission.draining = True
            self._drain = asyncio.ensure_future(self._drain_engine())
        else:
            log.warning("ending at once: running requests are cut off")
            self.force_exit = self.should_exit = True
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; the engine's process is reaped even where nothing else is waited for."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    async def _drain_engine(self) -> None:
        timeout_s = self._context.settings.shutdown_timeout_s
        num = self._context.admission.in_flight
        log.info("shutting down: %d running requests have %g s to end", num, timeout_s)
        try:
            await self._context.client.drain(timeout_s)
        except Exception:
            log.exception("the engine could not be drained")
        self.should_exit = True
