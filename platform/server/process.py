"""`ProcessClient`: an engine in a process of its own, watched and restarted.

One task reads the socket and hands events to the streams that wait for them; one watches the
engine's heartbeat. When the engine dies or hangs, what was in flight ends with a retryable
`EngineDied`, and a new engine is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from plait.adapters.info import AdapterInfo, AdapterState, AddedToken
from plait.platform.config import EngineConfig, Options
from plait.platform.core import Event, Request
from plait.platform.errors import (
    BadRequest,
    EngineDied,
    InternalError,
    Overloaded,
    PlaitError,
    by_code,
)
from plait.platform.messages import (
    Abort,
    AdapterLoaded,
    AdapterStates,
    Drain,
    Events,
    Failed,
    ForgetImages,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    Probed,
    Ready,
    Start,
    Starting,
    Stats,
    ToEngine,
)
from plait.platform.server.adapters.engine_side import EngineAdapters
from plait.platform.server.sent_images import SentImages

log = logging.getLogger(__name__)

# An engine that says nothing for so long has hung: it speaks after each step, and each second when
# idle. A slow model's longest step takes some 100 times its warm-up's two single-row steps.
HANG_S = 60.0
HANG_WARM_UPS = 300.0
START_TIMEOUT_S = 600.0  # without a word from a starting engine
MAX_RESTARTS = 5  # in a row, without one that served
RESTART_DELAY_S = 1.0


@dataclass(slots=True)
class _InFlight:
    """A request that waits for events; owned by its `stream` call."""

    remaining: int  # sequences without their last event
    queue: asyncio.Queue[Event | PlaitError] = field(default_factory=asyncio.Queue)


class ProcessClient:
    """See `EngineClient`. Made by `start`, ended by `close`."""

    def __init__(
        self, options: Options, on_phase: Callable[[str, float], None], hang_s: float | None
    ) -> None:
        self._options = options
        self._on_phase = on_phase
        self._hang_s = HANG_S if hang_s is None else hang_s
        self._fits_hang_to_model = hang_s is None
        self._config: EngineConfig | None = None
        self._stats = Stats()
        self.facts: dict[str, object] = {}
        self.phases: dict[str, float] = {}
        self._requests: dict[str, _InFlight] = {}
        self._adapters = EngineAdapters(self._send)
        self._images = SentImages()
        self._encoder = msgspec.msgpack.Encoder()
        self._engine: _EngineProcess | None = None
        self._reason = "the engine is starting"  # empty: requests can be taken
        self._draining = False
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        options: Options,
        *,
        on_phase: Callable[[str, float], None] = lambda _phase, _seconds: None,
        hang_s: float | None = None,
    ) -> ProcessClient:
        """Start an engine and wait until it serves. Raises `PlaitError` with the cause."""
        client = cls(options, on_phase, hang_s)
        try:
            await client._launch()
        except BaseException:
            await client.close()
            raise
        client._keeper = asyncio.create_task(client._keep())
        return client

    # --- EngineClient ---

    @property
    def config(self) -> EngineConfig | None:
        """See `EngineClient.config`."""
        return self._config

    @property
    def stats(self) -> Stats:
        """See `EngineClient.stats`."""
        return self._stats

    @property
    def ready(self) -> bool:
        """See `EngineClient.ready`."""
        return not self._reason and not self._draining

    @property
    def healthy(self) -> bool:
        """See `EngineClient.healthy`."""
        return not self._reason and self._silence_s() < self._hang_s

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id, for logs and tests."""
        return None if self._engine is None else self._engine.pid

    @property
    def unhealthy_reason(self) -> str:
        """See `EngineClient.unhealthy_reason`."""
        if self._reason or self._draining:
            return self._reason or "the server is shutting down"
        silence = self._silence_s()
        return "" if silence < self._hang_s else f"the engine has been silent for {silence:.0f} s"

    async def stream(
        self, request: Request, *, timeout_s: float | None = None
    ) -> AsyncIterator[Event]:
        """See `EngineClient.stream`."""
        if not self.ready:
            raise Overloaded(self.unhealthy_reason, retry_after_s=5)
        if request.request_id in self._requests:
            raise BadRequest(
                f"request id {request.request_id} is already in flight", param="request_id"
            )
        await self._adapters.check(use.generation for use in request.adapters)
        entry = _InFlight(remaining=request.params.n)
        request_id = request.request_id
        self._requests[request_id] = entry
        lent, messages = self._images.lend(request, timeout_s)
        del request  # its images may take many megabytes
        try:
            while messages:  # the first is on its way before this gives way to others
                await self._send(messages.pop(0))
            while entry.remaining:
                event = await entry.queue.get()
                if isinstance(event, PlaitError):
                    entry.remaining = 0
                    raise event
                if event.finish_reason is not None:
                    entry.remaining -= 1
                if event.error is not None:  # ends the request: the other answers are aborted
                    raise by_code(event.error[0])(event.error[1])
                yield event
        finally:
            del self._requests[request_id]
            if entry.remaining:
                self._send_soon(Abort(request_ids=(request_id,)))
            if gone := self._images.give_back(lent):
                self._send_soon(ForgetImages(names=gone))

    async def load_adapter(
        self,
        generation: str,
        directory: str,
        *,
        pinned: bool = False,
        allow_zero_delta: bool = False,
        added_tokens: tuple[AddedToken, ...] = (),
    ) -> AdapterInfo:
        """See `EngineClient.load_adapter`."""
        if not self.ready:
            raise Overloaded(self.unhealthy_reason, retry_after_s=5)
        return await self._adapters.load(
            LoadAdapter(
                generation=generation,
                directory=directory,
                pinned=pinned,
                allow_zero_delta=allow_zero_delta,
                added_tokens=added_tokens,
            )
        )

    async def pin_adapter(self, generation: str, *, pinned: bool) -> None:
        """See `EngineClient.pin_adapter`."""
        with contextlib.suppress(EngineDied):  # the next engine is told when it gets the adapter
            await self._adapters.pin(generation, pinned=pinned)

    async def drop_adapter(self, generation: str) -> None:
        """See `EngineClient.drop_adapter`."""
        with contextlib.suppress(EngineDied):  # the next engine never hears of it
            await self._adapters.drop(generation)

    @property
    def adapter_states(self) -> Mapping[str, AdapterState]:
        """See `EngineClient.adapter_states`."""
        return self._adapters.states

    async def drain(self, timeout_s: float) -> None:
        """See `EngineClient.drain`."""
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._requests:
            log.warning("drain: aborting %d requests still running", len(self._requests))
            with contextlib.suppress(EngineDied):  # its end fails them too
                await self._send(Abort(request_ids=tuple(self._requests)))
            last = time.monotonic() + 2.0
            while self._requests and time.monotonic() < last:
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """See `EngineClient.close`."""
        self._reason = self._reason or "the server is shutting down"
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._fail_all(EngineDied("the server is shutting down; try again elsewhere"))
        if self._engine is not None:
            with contextlib.suppress(EngineDied, zmq.ZMQError):
                await self._send(Abort(request_ids=()))
                await self._send(Drain())
            await self._engine.end(patience_s=2.0)
            self._engine = None

    # --- the engine process's life ---

    async def _launch(self) -> None:
        """Start one engine process and wait for `Ready`."""
        self._engine = await _EngineProcess.create()
        self._images.renew()
        await self._send_start()
        while True:
            message = await self._engine.receive(START_TIMEOUT_S)
            if message is None:
                silence = f"the engine said nothing for {START_TIMEOUT_S:.0f} s"
                raise InternalError(f"{self._engine.death() or silence} while starting")
            if isinstance(message, Starting):
                self._on_phase(message.phase, message.seconds)
            elif isinstance(message, Failed):
                raise by_code(message.code)(message.message)
            elif isinstance(message, Ready):
                self._config, self.facts = message.config, message.facts
                self.phases = message.phases
                if self._fits_hang_to_model:
                    warm_up_s = message.phases.get("warm up", 0.0)
                    self._hang_s = max(HANG_S, HANG_WARM_UPS * warm_up_s)
                await self._restore_adapters()
                self._reason = ""
                return

    async def _restore_adapters(self) -> None:
        """Give a new engine the adapters of the one before, so that no request misses its own."""
        assert self._engine is not None
        await self._adapters.send_again()
        while not self._adapters.is_restored:
            message = await self._engine.receive(START_TIMEOUT_S)
            if message is None:
                silence = f"the engine said nothing for {START_TIMEOUT_S:.0f} s"
                raise InternalError(f"{self._engine.death() or silence} while loading adapters")
            if isinstance(message, AdapterLoaded | AdapterStates):
                self._adapters.take(message)

    async def _keep(self) -> None:
        """Read events for ever; restart the engine whenever it dies or hangs."""
        failures = 0
        while True:
            began = time.monotonic()
            cause = await self._read_until_dead()
            self._reason = f"the engine is restarting: {cause}"
            log.error("%s; %d requests fail", self._reason, len(self._requests))
            self._fail_all(EngineDied(f"{cause} while this request ran; it can be retried"))
            failures = failures + 1 if time.monotonic() - began < 60 else 1
            while not await self._restart():
                failures += 1
                if failures > MAX_RESTARTS:
                    self._reason = f"the engine does not start any more: {self._reason}"
                    log.critical(self._reason)
                    return
                await asyncio.sleep(RESTART_DELAY_S * failures)

    async def _restart(self) -> bool:
        assert self._engine is not None
        await self._engine.end(patience_s=0.0)
        self._stats = Stats()
        try:
            await self._launch()
        except PlaitError as error:
            self._reason = error.message
            return False
        log.warning("the engine serves again")
        return True

    async def _read_until_dead(self) -> str:
        """Hand out events until the engine ends or hangs; say which."""
        assert self._engine is not None
        while True:
            message = await self._engine.receive(self._hang_s)
            if message is None:
                return self._engine.death() or f"the engine hung for {self._hang_s:.0f} s"
            if isinstance(message, Heartbeat):
                self._stats = message.stats
            elif isinstance(message, Probed):
                self.facts["probe"] = message.rates
            elif isinstance(message, AdapterLoaded | AdapterStates):
                self._adapters.take(message)
            elif isinstance(message, Events):
                self._stats = message.stats or self._stats
                for event in message.events:
                    entry = self._requests.get(event.request_id)
                    if entry is not None:
                        entry.queue.put_nowait(event)

    def _fail_all(self, error: PlaitError) -> None:
        self._adapters.engine_ended(error)
        for entry in self._requests.values():
            entry.queue.put_nowait(error)

    def _silence_s(self) -> float:
        return 0.0 if self._engine is None else time.monotonic() - self._engine.last_word_s

    async def _send_start(self) -> None:
        """Send the first message, once the engine has connected; it may die before that."""
        assert self._engine is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                await self._send(Start(options=self._options))
                return
            except EngineDied:
                if self._engine.death() or time.monotonic() > deadline:
                    return  # `receive` tells which
            await asyncio.sleep(0.01)

    async def _send(self, message: ToEngine) -> None:
        """Raises `EngineDied` where no engine listens: without NOBLOCK a send waits for one."""
        if self._engine is None:
            raise EngineDied("the server is shutting down")
        try:
            await self._engine.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDied("the engine has just ended; the request can be retried") from None

    def _send_soon(self, message: ToEngine) -> None:
        """Send from where nothing may be awaited: a generator that is being closed."""
        if self._engine is None:
            return
        with contextlib.suppress(zmq.ZMQError):
            sent = self._engine.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
            # Without an engine there is nothing to abort.
            asyncio.ensure_future(sent).add_done_callback(lambda f: f.cancelled() or f.exception())


class _EngineProcess:
    """One child process with its socket; ends both."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: zmq.asyncio.Socket,
        context: zmq.asyncio.Context,
        directory: str,
    ) -> None:
        self._process = process
        self.socket = socket
        self._context = context
        self._directory = directory
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.last_word_s = time.monotonic()

    @classmethod
    async def create(cls) -> _EngineProcess:
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

    async def receive(self, timeout_s: float) -> FromEngine | None:
        """The next message; None when the process ended or said nothing for `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not await self.socket.poll(200):
            if self._process.returncode is not None and not await self.socket.poll(0):
                return None
            if time.monotonic() > deadline:
                return None
        message: FromEngine = self._decoder.decode(await self.socket.recv())
        self.last_word_s = time.monotonic()
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
        self.socket.close(0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


def _short_temp_dir() -> str | None:
    """A directory whose socket paths stay under the 107 bytes that Unix sockets allow."""
    return "/tmp" if len(tempfile.gettempdir()) > 60 and Path("/tmp").is_dir() else None
