"""Requests that run in an `LLM`: steps for all of them, and who listens to each."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.platform.core import Event, FinishReason, Request
from plait.platform.errors import GrammarTooComplex, InternalError, PlaitError, by_code
from plait.platform.offline.outputs import CompletionDelta, RequestOutput

if TYPE_CHECKING:
    from plait.platform.engine import Engine


@dataclass(slots=True, kw_only=True)
class Job:
    """A request in the engine, and who listens to it."""

    request: Request
    output: RequestOutput
    listen: Callable[[CompletionDelta], None]
    error: PlaitError | None = None


class Turns:
    """A lock for threads that take turns; the same thread may enter again.

    A thread that leaves and comes back at once mostly finds the lock free before those that wait
    have woken, so whoever holds it again and again lets others in with `yield_turn`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[None] = deque()  # its ends are atomic, a number's += is not

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.append(None)
            try:
                self._lock.acquire()
            finally:
                self._waiting.pop()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def yield_turn(self) -> None:
        """Outside of the lock: let a thread that waits have it first."""
        if self._waiting:
            time.sleep(0.001)


class Running:
    """What an engine computes for one process.

    Threads take `turns` at it. Whose turn it is steps for all; events go to whoever listens.
    """

    def __init__(self, engine: Engine) -> None:
        self.turns = Turns()
        self._engine = engine
        self._jobs: dict[str, Job] = {}

    def run_all(
        self, jobs: list[tuple[Request, RequestOutput]], *, show: bool
    ) -> list[RequestOutput]:
        """Run them until all have ended; with `show`, under a progress bar."""
        try:
            with _Bar(sum(r.params.n for r, _ in jobs), show) as bar:
                waiting = deque(Job(request=r, output=o, listen=bar.event) for r, o in jobs)
                while True:
                    with self.turns:
                        while waiting and self._engine.has_room:
                            self._add(waiting.popleft())
                        if not waiting and all(output.finished for _, output in jobs):
                            break
                        self.step()
                    self.turns.yield_turn()
        finally:
            self._abort([request.request_id for request, _ in jobs])
        return [output for _, output in jobs]

    def stream(
        self, request: Request, output: RequestOutput, *, constraint_param: str | None = None
    ) -> Iterator[CompletionDelta]:
        """What each step adds to one answer. Leaving early aborts it. Raises `PlaitError`.

        `constraint_param` is the field whose grammar holds, for errors about that.
        """
        deltas: deque[CompletionDelta] = deque()
        job = Job(request=request, output=output, listen=deltas.append)
        with self.turns:
            while not self._engine.has_room:
                self.step()
            self._add(job)
        try:
            while deltas or not output.finished:
                if not deltas:
                    with self.turns:
                        if not deltas and not output.finished:  # others step, too
                            self.step()
                    self.turns.yield_turn()
                    continue
                delta = deltas.popleft()
                if delta.error is not None:
                    error = job.error or InternalError(delta.error)
                    if isinstance(error, GrammarTooComplex):
                        error.param = constraint_param
                    raise error
                yield delta
        finally:
            self._abort([request.request_id])

    def _add(self, job: Job) -> None:
        self._engine.add(job.request)
        self._jobs[job.request.request_id] = job

    def step(self) -> None:
        """One step for everything that runs, whoever waits for it."""
        with self.turns:
            for event in self._engine.step():
                self._hand_out(event)

    def _hand_out(self, event: Event) -> None:
        job = self._jobs.get(event.request_id)
        if job is None:
            return
        if event.error is not None:
            job.error = by_code(event.error[0])(event.error[1])
        job.listen(job.output.apply(event))
        if job.output.finished:
            del self._jobs[event.request_id]

    def abort_all(self) -> None:
        """End all that runs: what has not finished ends as aborted, for whoever waits for it."""
        with self.turns:
            for job in list(self._jobs.values()):
                self._engine.abort(job.request.request_id)
                for answer in job.output.outputs:
                    if answer.finish_reason is None:
                        self._hand_out(_aborted(job, answer.index))

    def _abort(self, request_ids: Sequence[str]) -> None:
        """End those of `request_ids` that still run, and give back what they held."""
        with self.turns:
            left = [request_id for request_id in request_ids if request_id in self._jobs]
            for request_id in left:
                self._engine.abort(request_id)
                del self._jobs[request_id]


def _aborted(job: Job, index: int) -> Event:
    return Event(
        request_id=job.request.request_id,
        index=index,
        finish_reason=FinishReason.ABORT,
        num_cached_tokens=job.output.num_cached_tokens,
    )


class _Bar:
    """The progress bar of a batch: answers done, tokens a second."""

    def __init__(self, total: int, show: bool) -> None:
        self._show = show and total > 1 and sys.stderr.isatty()
        self._total = total
        self._num_tokens = 0
        self._began = time.monotonic()

    def __enter__(self) -> _Bar:
        if self._show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("answers"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]:.0f} tok/s"),
                console=Console(stderr=True),
            )
            self._progress.start()
            self._task = self._progress.add_task("answers", total=self._total, rate=0.0)
        return self

    def event(self, delta: CompletionDelta) -> None:
        self._num_tokens += len(delta.token_ids)
        if self._show:
            self._progress.update(
                self._task,
                advance=delta.finish_reason is not None,
                rate=self._num_tokens / max(time.monotonic() - self._began, 1e-9),
            )

    def __exit__(self, *_: object) -> None:
        if self._show:
            self._progress.stop()
