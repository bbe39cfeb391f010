"""A number of bytes that all requests share, taken in the order of asking."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from plait.platform.errors import Overloaded


class ByteBudget:
    """Bytes to reserve. All calls come from one event loop, but `Reservation.free` from anywhere.

    Whoever asks waits behind those who asked before, so that a large request is not starved by
    small ones.
    """

    def __init__(self, num_bytes: int, *, what: str, wait_s: float) -> None:
        self.num_bytes = num_bytes
        self._what = what
        self._wait_s = wait_s
        self._used = 0
        self._waiting: deque[_Waiter] = deque()
        # Filled by finalizers, which may run in any thread and within any line of this class.
        self._freed: deque[int] = deque()

    @property
    def used(self) -> int:
        """Bytes that are reserved now."""
        self._collect()
        return self._used

    async def reserve(self, num_bytes: int) -> Reservation:
        """Take bytes, waiting for them. Raises `Overloaded` where they do not come free in time."""
        self._collect()
        if not self._waiting and self._used + num_bytes <= self.num_bytes:
            return self._take(num_bytes)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(num_bytes=num_bytes, loop=loop, granted=loop.create_future())
        self._waiting.append(waiter)
        self._settle()  # what was freed between the look and the entry woke nobody
        try:
            async with asyncio.timeout(self._wait_s):
                return await waiter.granted
        except BaseException as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.granted.done() and not waiter.granted.cancelled():
                waiter.granted.result().free()
            self._settle()
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"no memory for {self._what} came free: try again later", retry_after_s=5.0
                ) from None
            raise

    def _take(self, num_bytes: int) -> Reservation:
        self._used += num_bytes
        return Reservation(self, num_bytes)

    def _collect(self) -> None:
        while self._freed:
            self._used -= self._freed.popleft()

    def _settle(self) -> None:
        """Grant what can be granted, first come, first served."""
        self._collect()
        while self._waiting and self._used + self._waiting[0].num_bytes <= self.num_bytes:
            waiter = self._waiting.popleft()
            if not waiter.granted.done():
                waiter.granted.set_result(self._take(waiter.num_bytes))

    def free(self, num_bytes: int) -> None:
        """Give bytes back; from any thread, a finalizer's too, so it takes no lock."""
        self._freed.append(num_bytes)
        try:
            loop = self._waiting[0].loop
            loop.call_soon_threadsafe(self._settle)
        except (IndexError, RuntimeError):  # nobody waits, or the loop has ended
            pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiter:
    num_bytes: int
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[Reservation]


class Reservation:
    """Bytes that are taken. Freed once, in whole or piece by piece."""

    def __init__(self, budget: ByteBudget, num_bytes: int) -> None:
        self._budget = budget
        self._left = num_bytes

    def free(self, num_bytes: int | None = None) -> None:
        """Give so many bytes back, or all that are left."""
        given = self._left if num_bytes is None else min(num_bytes, self._left)
        self._left -= given
        if given:
            self._budget.free(given)

    def hold_for(self, array: np.ndarray, num_bytes: int) -> None:
        """Give so many bytes back when nobody holds `array` any more."""
        given = min(num_bytes, self._left)
        self._left -= given
        if given:
            weakref.finalize(array, self._budget.free, given).atexit = False
