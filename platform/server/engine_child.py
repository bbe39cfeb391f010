"""One engine process and the socket to it: messages there and back, its end, how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from plait.platform.errors import EngineDied
from plait.platform.messages import FromEngine, Start, ToEngine

if TYPE_CHECKING:
    from plait.platform.config import Options


class EngineChild:
    """One process with an engine, and the socket to it. Made by `create`; `end` ends both."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: zmq.asyncio.Socket,
        context: zmq.asyncio.Context,
        directory: str,
    ) -> None:
        self._process = process
        self._socket = socket
        self._context = context
        self._directory = directory
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._last_word_s = time.monotonic()

    @classmethod
    async def create(cls) -> EngineChild:
        """Start a process; it loads nothing before it is told how."""
        directory = tempfile.mkdtemp(prefix="plait-", dir=_short_temp_dir())  # mode 0700
        address = f"ipc://{directory}/engine"
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        # A session of its own: Ctrl-C in the terminal reaches the server, which drains.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "plait.platform.engine_process",
            address,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process, socket, context, directory)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def silence_s(self) -> float:
        """Since it said anything."""
        return time.monotonic() - self._last_word_s

    async def start(self, options: Options, timeout_s: float) -> None:
        """Send the first message, once the engine has connected; it may die before that."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self.send(Start(options=options))
                return
            except EngineDied:
                if self.death() or time.monotonic() > deadline:
                    return  # `receive` tells which
            await asyncio.sleep(0.01)

    async def send(self, message: ToEngine) -> None:
        """Raises `EngineDied` where no engine listens: without NOBLOCK a send waits for one."""
        try:
            await self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDied("the engine has just ended; the request can be retried") from None

    def send_soon(self, message: ToEngine) -> None:
        """Send from where nothing may be awaited: a generator that is being closed."""
        with contextlib.suppress(zmq.ZMQError):
            sent = self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
            # Without an engine there is nothing to abort.
            asyncio.ensure_future(sent).add_done_callback(lambda f: f.cancelled() or f.exception())

    async def receive(self, timeout_s: float) -> FromEngine | None:
        """The next message; None when the process ended or said nothing for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not await self._socket.poll(200):
            if self._process.returncode is not None and not await self._socket.poll(0):
                return None
            if time.monotonic() > deadline:
                return None
        message: FromEngine = self._decoder.decode(await self._socket.recv())
        self._last_word_s = time.monotonic()
        return message

    def death(self) -> str:
        """How the process ended, or an empty string while it lives."""
        code = self._process.returncode
        if code is None:
            return ""
        how = f"signal {-code}" if code < 0 else f"status {code}"
        return f"the engine process ended with {how}"

    async def end(self, *, patience_s: float) -> None:
        """Wait `patience_s` for it to end by itself, then kill it; free socket and directory."""
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._socket.close(0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _short_temp_dir() -> str | None:
    """A directory whose socket paths stay under the 107 bytes that Unix sockets allow."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 and Path("/tmp").is_dir() else None
