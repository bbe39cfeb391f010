"""Results by key: made once for all who ask at the same time, and the latest kept for later."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """What can be kept."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...


T = TypeVar("T", bound=Sized)


class SharedWork(Generic[T]):
    """Runs makers of results in threads of its own. Any thread, or event loop, may ask."""

    def __init__(self, *, num_threads: int, kept_bytes: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._bound = kept_bytes
        self._lock = threading.Lock()
        self._running: dict[str, _Running[T]] = {}
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept."""
        return self._num_bytes

    async def get(self, key: str, make: Callable[[], T]) -> T:
        """The result, waited for off the loop. Who leaves last cancels what has not begun."""
        running = self._ask(key, make)
        try:
            return await asyncio.shield(asyncio.wrap_future(running.future))
        finally:
            self._leave(key, running)

    def get_blocking(self, key: str, make: Callable[[], T]) -> T:
        """The result, waiting for it in this thread."""
        running = self._ask(key, make)
        try:
            return running.future.result()
        finally:
            self._leave(key, running)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, key: str, make: Callable[[], T]) -> _Running[T]:
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                done: Future[T] = Future()
                done.set_result(kept)
                return _Running(future=done)
            running = self._running.get(key)
            if running is None:
                running = _Running(future=self._pool.submit(self._make, key, make))
                self._running[key] = running
            running.num_waiting += 1
            return running

    def _make(self, key: str, make: Callable[[], T]) -> T:
        made = make()
        with self._lock:
            self._keep(key, made)
        return made

    def _keep(self, key: str, made: T) -> None:
        if made.num_bytes > self._bound or key in self._kept:
            return
        self._kept[key] = made
        self._num_bytes += made.num_bytes
        while self._num_bytes > self._bound:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def _leave(self, key: str, running: _Running[T]) -> None:
        with self._lock:
            running.num_waiting -= 1
            if running.num_waiting == 0:
                running.future.cancel()
                if self._running.get(key) is running:
                    del self._running[key]


@dataclass(slots=True, kw_only=True, eq=False)
class _Running(Generic[T]):
    """One result being made, and how many wait for it."""

    future: Future[T]
    num_waiting: int = 0
