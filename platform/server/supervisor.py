"""The life of the engine: started, watched, and started anew when it dies or hangs.

May enter: what is known of an engine process, and what ends with it. May not enter: what requests
and adapters want of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import zmq

from plait.platform.config import EngineConfig, Options
from plait.platform.errors import EngineDied, InternalError, PlaitError, by_code
from plait.platform.messages import (
    Abort,
    AdapterLoaded,
    AdapterStates,
    Drain,
    Events,
    Failed,
    FromEngine,
    Heartbeat,
    Probed,
    Ready,
    Starting,
    Stats,
    ToEngine,
)
from plait.platform.server.adapters.engine_side import EngineAdapters
from plait.platform.server.engine_child import EngineChild
from plait.platform.server.in_flight import InFlightRequests
from plait.platform.server.sent_images import SentImages

log = logging.getLogger(__name__)

# An engine that says nothing for so long has hung: it speaks after each step, and each second when
# idle. A slow model's longest step takes some 100 times its warm-up's two single-row steps.
HANG_S = 60.0
HANG_WARM_UPS = 300.0
START_TIMEOUT_S = 600.0  # without a word from a starting engine
MAX_RESTARTS = 5  # in a row, without one that served
RESTART_DELAY_S = 1.0

CLOSING = "the server is shutting down"


class Supervisor:
    """Keeps one engine running. One task reads all it says, as long as it lives.

    Owns what one engine has and the next has not: events of `requests` that are to come,
    `adapters` that it loaded, `images` that it was sent.
    """

    def __init__(
        self, options: Options, on_phase: Callable[[str, float], None], hang_s: float | None
    ) -> None:
        self.requests = InFlightRequests()
        self.adapters = EngineAdapters(self.send)
        self.images = SentImages()
        self.config: EngineConfig | None = None
        self.stats = Stats()
        self.facts: dict[str, object] = {}
        self.phases: dict[str, float] = {}
        self.reason = "the engine is starting"  # why nothing can be sent; empty: it can
        self._options = options
        self._on_phase = on_phase
        self._hang_s = HANG_S if hang_s is None else hang_s
        self._fits_hang_to_model = hang_s is None
        self._engine: EngineChild | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the engine, if there is one."""
        return None if self._engine is None else self._engine.pid

    @property
    def silence(self) -> str:
        """For how long an engine that seems to hang has been silent; empty: it does not."""
        silence_s = 0.0 if self._engine is None else self._engine.silence_s
        hangs = silence_s >= self._hang_s
        return f"the engine has been silent for {silence_s:.0f} s" if hangs else ""

    async def start(self) -> None:
        """Start an engine and wait until it serves. Raises `PlaitError` with the cause."""
        await self._launch()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End the engine, and what waits for it."""
        self.reason = self.reason or CLOSING
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._fail_all(EngineDied(f"{CLOSING}; try again elsewhere"))
        if self._engine is not None:
            with contextlib.suppress(EngineDied, zmq.ZMQError):
                await self.send(Abort(request_ids=()))
                await self.send(Drain())
            await self._engine.end(patience_s=2.0)
            self._engine = None

    async def send(self, message: ToEngine) -> None:
        """Raises `EngineDied` where no engine listens."""
        if self._engine is None:
            raise EngineDied(CLOSING)
        await self._engine.send(message)

    def send_soon(self, message: ToEngine) -> None:
        """Send from where nothing may be awaited; lost where no engine listens."""
        if self._engine is not None:
            self._engine.send_soon(message)

    # --- starting ------------------------------------------------------------------------------

    async def _launch(self) -> None:
        """Start one engine process and wait for `Ready`."""
        self._engine = await EngineChild.create()
        self.images.renew()
        await self._engine.start(self._options, START_TIMEOUT_S)
        while True:
            message = await self._hear(self._engine, "starting")
            if isinstance(message, Starting):
                self._on_phase(message.phase, message.seconds)
            elif isinstance(message, Failed):
                raise by_code(message.code)(message.message)
            elif isinstance(message, Ready):
                await self._take_ready(self._engine, message)
                return

    async def _take_ready(self, engine: EngineChild, message: Ready) -> None:
        self.config, self.facts, self.phases = message.config, message.facts, message.phases
        if self._fits_hang_to_model:
            warm_up_s = message.phases.get("warm up", 0.0)
            self._hang_s = max(HANG_S, HANG_WARM_UPS * warm_up_s)
        # It gets the adapters of the one before, so that no request misses its own.
        await self.adapters.send_again()
        while not self.adapters.is_restored:
            answer = await self._hear(engine, "loading adapters")
            if isinstance(answer, AdapterLoaded | AdapterStates):
                self.adapters.take(answer)
        self.reason = ""

    @staticmethod
    async def _hear(engine: EngineChild, doing: str) -> FromEngine:
        """What a starting engine says next. Raises `InternalError` where it says nothing more."""
        message = await engine.receive(START_TIMEOUT_S)
        if message is None:
            silence = f"the engine said nothing for {START_TIMEOUT_S:.0f} s"
            raise InternalError(f"{engine.death() or silence} while {doing}")
        return message

    # --- watching ------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Read events for ever; restart the engine whenever it dies or hangs."""
        failures = 0
        while True:
            began = time.monotonic()
            cause = await self._read_until_dead()
            self.reason = f"the engine is restarting: {cause}"
            log.error("%s; %d requests fail", self.reason, len(self.requests))
            self._fail_all(EngineDied(f"{cause} while this request ran; it can be retried"))
            failures = failures + 1 if time.monotonic() - began < 60 else 1
            while not await self._restart():
                failures += 1
                if failures > MAX_RESTARTS:
                    self.reason = f"the engine does not start any more: {self.reason}"
                    log.critical(self.reason)
                    return
                await asyncio.sleep(RESTART_DELAY_S * failures)

    async def _restart(self) -> bool:
        assert self._engine is not None
        await self._engine.end(patience_s=0.0)
        self.stats = Stats()
        try:
            await self._launch()
        except PlaitError as error:
            self.reason = error.message
            return False
        log.warning("the engine serves again")
        return True

    async def _read_until_dead(self) -> str:
        """Hand out what the engine says until it ends or hangs; say which."""
        assert self._engine is not None
        while True:
            message = await self._engine.receive(self._hang_s)
            if message is None:
                return self._engine.death() or f"the engine hung for {self._hang_s:.0f} s"
            if isinstance(message, Heartbeat):
                self.stats = message.stats
            elif isinstance(message, Probed):
                self.facts["probe"] = message.rates
            elif isinstance(message, AdapterLoaded | AdapterStates):
                self.adapters.take(message)
            elif isinstance(message, Events):
                self.stats = message.stats or self.stats
                self.requests.deliver(message.events)

    def _fail_all(self, error: PlaitError) -> None:
        self.adapters.engine_ended(error)
        self.requests.fail(error)
