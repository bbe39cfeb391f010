"""Cheap refusal before any work: a bound on requests in this process, and when to come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from plait.platform.config import SchedulerConfig
from plait.platform.errors import BadRequest, Overloaded

if TYPE_CHECKING:
    from plait.platform.config import EngineConfig
    from plait.platform.server.client import EngineClient

MAX_RETRY_AFTER_S = 60.0  # SDKs give up on more than 120
_SMOOTHING = 0.1  # weight of the newest gap between two completions


class DrainRate:
    """Completed requests per second, smoothed over about the last ten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None
        self._gap_s: float | None = None

    def started(self) -> None:
        """Work begins after a pause: the pause says nothing about the rate."""
        self._last = self._clock()

    def completed(self) -> None:
        """One request ended."""
        now = self._clock()
        if self._last is not None:
            gap = now - self._last
            old = self._gap_s
            self._gap_s = gap if old is None else old + _SMOOTHING * (gap - old)
        self._last = now

    def seconds_for(self, num_requests: float) -> float:
        """How long that many take to end, at the measured rate; 1 s where none is known."""
        if self._gap_s is None:
            return 1.0
        return min(max(1.0, num_requests * self._gap_s), MAX_RETRY_AFTER_S)


class Admission:
    """Counts what is in flight and refuses what could not even be queued.

    The engine's own bound is exact and may still refuse; this one costs no tokenization.
    """

    def __init__(self, client: EngineClient, *, shutdown_timeout_s: float) -> None:
        self._client = client
        self._shutdown_timeout_s = shutdown_timeout_s
        self.in_flight = 0  # engine requests: one per prompt
        self.draining = False
        self.drain_rate = DrainRate()

    def config(self) -> EngineConfig:
        """The engine's configuration. Raises `Overloaded` while it is not ready."""
        if self.draining:
            raise Overloaded(
                "the server is shutting down; send this to another, or again once it is back",
                retry_after_s=self._shutdown_timeout_s,
            )
        config = self._client.config
        if config is None or not self._client.ready:
            reason = self._client.unhealthy_reason or "the engine is not ready"
            raise Overloaded(reason, retry_after_s=2.0)
        return config

    def capacity(self, scheduler: SchedulerConfig) -> int:
        """Requests that may be in flight at once."""
        return scheduler.max_num_seqs + scheduler.max_num_queued

    def check(self, num_requests: int) -> EngineConfig:
        """Whether there are so many places now. Raises `Overloaded`, `BadRequest`."""
        config = self.config()
        capacity = self.capacity(config.scheduler)
        if num_requests > capacity:
            raise BadRequest(
                f"{num_requests} prompts are more than this server can queue ({capacity}); "
                "send fewer at a time",
                param="prompt",
            )
        if self.in_flight + num_requests > capacity:
            raise self.overloaded()
        return config

    @contextmanager
    def enter(self, num_requests: int) -> Iterator[EngineConfig]:
        """Hold places for engine requests while they run. Raises as `check`."""
        config = self.check(num_requests)
        if self.in_flight == 0:
            self.drain_rate.started()
        self.in_flight += num_requests
        try:
            yield config
        finally:
            self.in_flight -= num_requests

    def overloaded(self) -> Overloaded:
        """The refusal, with the time in which half of the queue drains."""
        waiting = max(self._client.stats.num_waiting, 1)
        return Overloaded(
            f"the server is full: {self.in_flight} requests run or wait; try again later",
            retry_after_s=self.drain_rate.seconds_for(waiting / 2),
        )
