"""`ProcessClient`: the server's side of an engine in a process of its own.

What it asks goes by `supervisor`, which keeps an engine running. When that dies or hangs, what was
in flight ends with a retryable `EngineDied`, and the next requests wait for a new engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping

from plait.adapters.info import AdapterInfo, AdapterState, AddedToken
from plait.platform.config import EngineConfig, Options
from plait.platform.core import Event, Request
from plait.platform.errors import EngineDied, Overloaded
from plait.platform.messages import Abort, ForgetImages, LoadAdapter, Stats
from plait.platform.server.supervisor import CLOSING, Supervisor

log = logging.getLogger(__name__)


class ProcessClient:
    """See `EngineClient`. Made by `start`, ended by `close`."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._draining = False

    @classmethod
    async def start(
        cls,
        options: Options,
        *,
        on_phase: Callable[[str, float], None] = lambda _phase, _seconds: None,
        hang_s: float | None = None,
    ) -> ProcessClient:
        """Start an engine and wait until it serves. Raises `PlaitError` with the cause."""
        supervisor = Supervisor(options, on_phase, hang_s)
        try:
            await supervisor.start()
        except BaseException:
            await supervisor.close()
            raise
        return cls(supervisor)

    # --- how it stands -------------------------------------------------------------------------

    @property
    def config(self) -> EngineConfig | None:
        """See `EngineClient.config`."""
        return self._supervisor.config

    @property
    def stats(self) -> Stats:
        """See `EngineClient.stats`."""
        return self._supervisor.stats

    @property
    def facts(self) -> Mapping[str, object]:
        """What the engine found out while starting, and since."""
        return self._supervisor.facts

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds that each phase of its start took."""
        return self._supervisor.phases

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id, for logs and tests."""
        return self._supervisor.pid

    @property
    def ready(self) -> bool:
        """See `EngineClient.ready`."""
        return not self._supervisor.reason and not self._draining

    @property
    def healthy(self) -> bool:
        """See `EngineClient.healthy`."""
        return not self._supervisor.reason and not self._supervisor.silence

    @property
    def unhealthy_reason(self) -> str:
        """See `EngineClient.unhealthy_reason`."""
        closing = CLOSING if self._draining else ""
        return self._supervisor.reason or closing or self._supervisor.silence

    # --- requests ------------------------------------------------------------------------------

    async def stream(
        self, request: Request, *, timeout_s: float | None = None
    ) -> AsyncIterator[Event]:
        """See `EngineClient.stream`."""
        engine = self._supervisor
        self._check_ready()
        await engine.adapters.check(use.generation for use in request.adapters)
        entry = engine.requests.open(request)
        request_id = request.request_id
        lent, messages = engine.images.lend(request, timeout_s)
        del request  # its images may take many megabytes
        try:
            while messages:  # the first is on its way before this gives way to others
                await engine.send(messages.pop(0))
            while entry.num_remaining:
                yield await entry.next()
        finally:
            engine.requests.close(request_id)
            if entry.num_remaining:
                engine.send_soon(Abort(request_ids=(request_id,)))
            if gone := engine.images.give_back(lent):
                engine.send_soon(ForgetImages(names=gone))

    def _check_ready(self) -> None:
        if not self.ready:
            raise Overloaded(self.unhealthy_reason, retry_after_s=5)

    # --- adapters ------------------------------------------------------------------------------

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
        self._check_ready()
        return await self._supervisor.adapters.load(
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
            await self._supervisor.adapters.pin(generation, pinned=pinned)

    async def drop_adapter(self, generation: str) -> None:
        """See `EngineClient.drop_adapter`."""
        with contextlib.suppress(EngineDied):  # the next engine never hears of it
            await self._supervisor.adapters.drop(generation)

    @property
    def adapter_states(self) -> Mapping[str, AdapterState]:
        """See `EngineClient.adapter_states`."""
        return self._supervisor.adapters.states

    # --- the end -------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """See `EngineClient.drain`."""
        self._draining = True
        requests = self._supervisor.requests
        await self._wait_for_requests(timeout_s)
        if requests:
            log.warning("drain: aborting %d requests still running", len(requests))
            with contextlib.suppress(EngineDied):  # its end fails them too
                await self._supervisor.send(Abort(request_ids=requests.request_ids))
            await self._wait_for_requests(2.0)

    async def _wait_for_requests(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._supervisor.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """See `EngineClient.close`."""
        await self._supervisor.close()
