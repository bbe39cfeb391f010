"""The workers of a pool: those that compile, and a spare that stands ready for when one is lost."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from plait.structured.worker import CompileWorker, WorkerLimits, WorkerLost

if TYPE_CHECKING:
    from plait.structured.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_NUM_STARTS = 3  # of a worker, until the compiler counts as broken


class Crew:
    """Starts workers and teaches them a vocabulary. Thread-safe; each worker has one user."""

    def __init__(self, vocabulary: Vocabulary, limits: WorkerLimits, *, has_spare: bool) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._has_spare = has_spare
        self._lock = threading.Lock()
        self._workers: set[CompileWorker] = set()
        self._spare: CompileWorker | None = None
        self._spare_thread: threading.Thread | None = None
        self._closed = False

    def ready(
        self, worker: CompileWorker | None, *, spare_too: bool = True
    ) -> CompileWorker | None:
        """The worker if it is good for more, else the spare or a new one; None if none starts.

        `spare_too`: have another spare made in the place of what is taken.
        """
        if worker is not None and worker.alive and not worker.is_full:
            return worker
        if worker is not None:
            self.drop(worker)
        for _ in range(_NUM_STARTS):
            fresh = self._started()
            if fresh is not None:
                if spare_too:
                    self.renew_spare()
                return fresh
        return None

    def give_back(self, worker: CompileWorker | None) -> None:
        """It is not needed any more: the spare, unless there is one."""
        if worker is None:
            return
        with self._lock:
            is_wanted = self._has_spare and self._spare is None and not self._closed
            if is_wanted and worker.alive and not worker.is_full:
                self._workers.discard(worker)
                self._spare = worker
                return
        self.drop(worker)

    def drop(self, worker: CompileWorker) -> None:
        """Kill it, if it lives, and forget it."""
        with self._lock:
            self._workers.discard(worker)
        worker.kill()

    def close(self) -> None:
        """Kill all; none is ready any more. Safe to call twice."""
        with self._lock:
            self._closed = True
            workers = self._all()
            self._workers.clear()
            self._spare = None
            thread = self._spare_thread
        for worker in workers:
            worker.kill()
        if thread is not None:
            thread.join()

    @property
    def pids(self) -> list[int]:
        """Their process ids, the spare's last."""
        with self._lock:
            return [worker.pid for worker in self._all()]

    def _all(self) -> list[CompileWorker]:
        return [*self._workers, *([self._spare] if self._spare else [])]

    def _started(self) -> CompileWorker | None:
        """The spare or a new worker, ready; None if it does not start, or all is closed."""
        with self._lock:
            fresh, self._spare = self._spare, None
        try:
            fresh = fresh or CompileWorker(self._limits)
        except (WorkerLost, OSError) as error:
            log.warning("a grammar worker did not start: %r", error)
            return None
        return self._taught(fresh)

    def _taught(self, fresh: CompileWorker) -> CompileWorker | None:
        """A worker that knows the vocabulary and that `close` knows of; None if it has died."""
        with self._lock:
            self._workers.add(fresh)
            closed = self._closed
        try:
            if not closed:
                fresh.learn(self._vocabulary)
                if fresh.alive:
                    return fresh
        except (WorkerLost, OSError) as error:
            if not self._closed:
                log.warning("a grammar worker did not start: %r", error)
        self.drop(fresh)
        return None

    def renew_spare(self) -> None:
        """Have a spare, if none is there, on a thread of its own: its libraries take a while."""
        with self._lock:
            if self._closed or not self._has_spare or self._spare is not None:
                return
            if self._spare_thread is not None and self._spare_thread.is_alive():
                return
            self._spare_thread = threading.Thread(
                target=self._make_spare, daemon=True, name="grammar-spare"
            )
            self._spare_thread.start()

    def _make_spare(self) -> None:
        try:
            spare = self._taught(CompileWorker(self._limits))
        except (WorkerLost, OSError):
            return
        with self._lock:
            if spare is None or self._closed:  # `close` has killed it
                return
            self._workers.discard(spare)
            surplus, self._spare = self._spare, spare
        if surplus is not None:  # given back meanwhile
            surplus.kill()
