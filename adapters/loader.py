"""Threads that read adapters and place them, so that no step waits for either.

Loads run on several threads, so that a slow disk holds up one adapter and not all; placements on
one, one after the other, since the executor is not asked for more. Each thread computes alone.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor as Threads
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from plait.adapters.adapter import Adapter
from plait.platform.errors import (
    AdapterPlacementFailed,
    AdapterStorageFailed,
    InternalError,
    PlaitError,
)

log = logging.getLogger(__name__)
NUM_LOAD_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one job: of a load the `adapter`, or the `error`."""

    generation: str
    is_load: bool
    adapter: Adapter | None = None
    error: PlaitError | None = None
    seconds: float = 0.0


class Loader:
    """Runs jobs elsewhere; `take` hands what came of them to the engine's thread."""

    def __init__(
        self, *, load_threads: Threads | None = None, place_threads: Threads | None = None
    ) -> None:
        self._load_threads = load_threads or _threads("adapter-load", NUM_LOAD_THREADS)
        self._place_threads = place_threads or _threads("adapter-place", 1)
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._has_outcomes = threading.Event()
        self.num_jobs = 0  # whose outcomes were not taken

    def load(self, generation: str, work: Callable[[], Adapter]) -> None:
        """Have `work` read an adapter."""
        self.num_jobs += 1
        self._load_threads.submit(self._run, generation, work, is_load=True)

    def place(self, generation: str, work: Callable[[], None]) -> None:
        """Have `work` place an adapter."""
        self.num_jobs += 1
        self._place_threads.submit(self._run, generation, work, is_load=False)

    def take(self) -> Iterator[Outcome]:
        """The outcomes that are there."""
        # Cleared first: what comes while the queue is emptied sets it again.
        if not self._has_outcomes.is_set():
            return
        self._has_outcomes.clear()
        # Each thread that sets its own number of threads sets torch's default for new ones too.
        torch.set_num_threads(torch.get_num_threads())
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except queue.Empty:
                return
            self.num_jobs -= 1
            yield outcome

    def wait(self, timeout_s: float) -> None:
        """Sleep until an outcome is there, or the time is over."""
        self._has_outcomes.wait(timeout_s)

    def close(self) -> None:
        """Begin no further job; those that run end by themselves."""
        self._load_threads.shutdown(wait=False, cancel_futures=True)
        self._place_threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, generation: str, work: Callable[[], Adapter | None], *, is_load: bool) -> None:
        began = time.monotonic()
        adapter, error = None, None
        try:
            adapter = work()
        except PlaitError as raised:
            error = raised
        except Exception as raised:
            log.exception("adapter %s could not be %s", generation[:12], _done(is_load))
            error = _as_plait_error(raised, is_load=is_load)
        seconds = time.monotonic() - began
        self._outcomes.put(
            Outcome(
                generation=generation,
                is_load=is_load,
                adapter=adapter,
                error=error,
                seconds=seconds,
            )
        )
        self._has_outcomes.set()


def _threads(name: str, count: int) -> Threads:
    # Under OpenMP this holds for the calling thread alone.
    return ThreadPoolExecutor(
        count, thread_name_prefix=name, initializer=torch.set_num_threads, initargs=(1,)
    )


def _done(is_load: bool) -> str:
    return "loaded" if is_load else "placed"


def _as_plait_error(raised: Exception, *, is_load: bool) -> PlaitError:
    if isinstance(raised, OSError):
        return AdapterStorageFailed("the stored adapter cannot be read; load it again")
    if is_load:
        return InternalError(f"loading the adapter failed ({type(raised).__name__})")
    return AdapterPlacementFailed(f"placing the adapter failed ({type(raised).__name__})")
