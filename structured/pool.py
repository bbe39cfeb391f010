"""Compiling off the request's way: workers that can be killed, one compile per grammar, caches.

A compile cannot be interrupted inside its library, may take minutes for a schema of a few hundred
bytes, and may crash. So it happens in another process with limits, and the process is what is
given up. Requests wait here; the engine never does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.platform.errors import BadRequest, Overloaded, by_code
from plait.structured import frames
from plait.structured.cache import DiskCache
from plait.structured.crew import Crew
from plait.structured.outcomes import Outcomes
from plait.structured.spec import CompiledGrammar
from plait.structured.work import (
    FairQueue,
    Outcome,
    Work,
    delayed,
    flight_key,
    internal,
    job_of,
    too_complex,
)
from plait.structured.worker import (
    CompileWorker,
    Died,
    TookTooLong,
    TookTooMuch,
    WorkerLimits,
)

if TYPE_CHECKING:
    from plait.structured.spec import GrammarSpec
    from plait.structured.vocabulary import Vocabulary

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Bounds of compiling."""

    num_workers: int = 1
    # A further one stands ready for when one is killed, or has others wait for so long.
    has_spare: bool = True
    relief_after_s: float = 0.25
    processor_limit_s: float = 2.0  # beyond it a grammar is too complex
    # Beyond it the machine is too busy, and others have waited enough. Workers are niced: where a
    # model keeps all cores busy, they get a quarter of one, or a tenth beside other processes.
    wall_limit_s: float = 30.0
    memory_bytes: int = 1 << 30
    max_pending: int = 64  # compiles that wait or run
    max_pending_per_tenant: int = 16
    cache_bytes: int = 256 << 20
    refusals_kept_s: float = 60.0
    cache_dir: Path | None = None  # None: nothing on disk
    disk_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts since the start; `counts` has compiled, refused, failed, killed_* and hits_*."""

    counts: dict[str, int]
    compile_seconds: float
    num_pending: int
    cache_bytes: int


class CompilePool:
    """Compiled grammars by content, from memory, disk or workers. Thread-safe.

    Nothing is started before the first grammar or `start`. Raises, for what it compiles, the
    router's errors; `GrammarTooComplex` beyond a limit; `Overloaded` when too many wait, and
    `GrammarDelayed`, which is one, where the machine is too busy to compile it in time.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: PoolSettings | None = None,
        *,
        observe: Callable[[str, float], None] | None = None,
    ) -> None:
        """`observe` is told backend (empty if refused) and seconds of each compile."""
        self._vocabulary = vocabulary
        self._observe = observe
        self._settings = settings or PoolSettings()
        self._limits = WorkerLimits(
            processor_limit_s=self._settings.processor_limit_s,
            wall_limit_s=self._settings.wall_limit_s,
            memory_bytes=self._settings.memory_bytes,
        )
        self._crew = Crew(vocabulary, self._limits, has_spare=self._settings.has_spare)
        self._outcomes = _outcomes(self._settings)
        self._lock = threading.Condition()
        self._pending: dict[str, Work] = {}
        self._queue = FairQueue()
        self._counts: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._seconds = 0.0
        self._compiling: dict[int, float] = {}  # by thread, since when it compiles what it does
        self._threads: list[threading.Thread] = []
        self._reader: ThreadPoolExecutor | None = None
        self._closed = False

    # --- for those who want a grammar ---

    async def compile(
        self, spec: GrammarSpec, *, tenant: str = "", vocabulary: Vocabulary | None = None
    ) -> CompiledGrammar:
        """The compiled grammar; others run meanwhile.

        `tenant` is whom compiles are counted for; `vocabulary` where it is not the base model's.
        Cancelled, the compile goes on for whoever asks next.
        """
        vocabulary = vocabulary or self._vocabulary
        future = self._submit(spec, tenant, vocabulary)
        return _given(await asyncio.shield(asyncio.wrap_future(future)), vocabulary)

    def compile_blocking(
        self, spec: GrammarSpec, *, tenant: str = "", vocabulary: Vocabulary | None = None
    ) -> CompiledGrammar:
        """As `compile`, for callers without an event loop."""
        vocabulary = vocabulary or self._vocabulary
        return _given(self._submit(spec, tenant, vocabulary).result(), vocabulary)

    def start(self) -> None:
        """Start the threads and their workers, so that the first grammar need not wait for them."""
        with self._lock:
            if self._closed:
                raise Overloaded("the server shuts down")
            if self._threads:
                return
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="grammar-cache")
            runs = [self._run] * self._settings.num_workers
            if self._settings.has_spare:
                runs.append(self._relieve)
            for number, run in enumerate(runs):
                thread = threading.Thread(target=run, daemon=True, name=f"grammar-compile-{number}")
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Kill the workers; whoever waits gets `Overloaded`. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            threads, self._threads = self._threads, []
        if self._reader is not None:
            self._reader.shutdown()
        self._crew.close()
        for thread in threads:
            thread.join()
        for work in list(self._pending.values()):
            self._settle(work, frames.Refused(Overloaded.code, "the server shuts down", None))

    @property
    def stats(self) -> PoolStats:
        """What has happened so far."""
        with self._lock:
            return PoolStats(
                counts=dict(self._counts),
                compile_seconds=self._seconds,
                num_pending=len(self._pending),
                cache_bytes=self._outcomes.num_bytes,
            )

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, the spare last."""
        return self._crew.pids

    # --- what is known, and single flight ---

    def _submit(self, spec: GrammarSpec, tenant: str, vocabulary: Vocabulary) -> Future[Outcome]:
        job = job_of(spec, vocabulary)
        key = self._outcomes.key(job)
        self.start()
        with self._lock:
            known = self._known(key, spec.param)
            if known is not None:
                return known
            self._check_room(tenant)
            work = Work(key=key, tenant=tenant, job=job, vocabulary=vocabulary, outcome=Future())
            self._pending[flight_key(key, spec.param)] = work
            self._tenants[tenant] += 1
            if self._outcomes.on_disk:
                assert self._reader is not None
                self._reader.submit(self._look_up, work)
            else:
                self._enqueue(work)
        return work.outcome

    def _known(self, key: str, param: str) -> Future[Outcome] | None:
        compiled = self._outcomes.compiled(key)
        if compiled is not None:
            self._counts["hits_memory"] += 1
            return _done(compiled)
        refused = self._outcomes.refused(key, param)
        if refused is not None:
            self._counts["hits_refused"] += 1
            return _done(refused)
        flight = flight_key(key, param)
        if flight in self._pending:
            self._counts["hits_pending"] += 1
            return self._pending[flight].outcome
        return None

    def _check_room(self, tenant: str) -> None:
        if self._closed or len(self._pending) >= self._settings.max_pending:
            raise Overloaded("too many grammars wait to be compiled; retry shortly")
        # Without keys all requests are one tenant, for whom the bound above is the bound.
        if tenant and self._tenants[tenant] >= self._settings.max_pending_per_tenant:
            raise Overloaded("too many grammars of this API key wait to be compiled; retry shortly")

    def _look_up(self, work: Work) -> None:
        """On the reader's thread: from disk, or on to the workers."""
        found = self._outcomes.read(work.key)
        if found is not None:
            with self._lock:
                self._counts["hits_disk"] += 1
            self._settle(work, found)
            return
        with self._lock:
            self._enqueue(work)

    def _enqueue(self, work: Work) -> None:
        """For the workers, under the lock."""
        self._queue.put(work)
        self._lock.notify_all()

    def _settle(self, work: Work, outcome: Outcome) -> None:
        """Keep an outcome and hand it to all who wait."""
        flight = flight_key(work.key, work.job.param)
        self._outcomes.keep(work.key, work.job.param, outcome)
        with self._lock:
            if self._pending.get(flight) is not work:
                return
            del self._pending[flight]
            self._tenants[work.tenant] -= 1
            if not self._tenants[work.tenant]:
                del self._tenants[work.tenant]
        work.outcome.set_result(outcome)

    # --- a worker's thread ---

    def _run(self) -> None:
        # The spare comes behind the first grammar: a server that gets none does without.
        worker = self._crew.ready(None, spare_too=False)
        while True:
            with self._lock:
                while not self._closed and not self._queue:
                    self._lock.wait()
                if self._closed:
                    return
                work = self._queue.get()
            worker = self._crew.ready(self._served(work, worker))
            self._crew.renew_spare()

    def _relieve(self) -> None:
        """Takes, with the spare, what waits behind a grammar that takes long.

        That may be one that is about to end at its limit, 30 s by the clock of a busy machine, and
        what waits is mostly done in some milliseconds.
        """
        while True:
            with self._lock:
                while not self._closed and (wait_s := self._relief_in_s()) != 0:
                    self._lock.wait(wait_s)
                if self._closed:
                    return
                work = self._queue.get()
            self._crew.give_back(self._served(work, None))

    def _relief_in_s(self) -> float | None:
        """Until what waits should be relieved; None: not before something changes."""
        if not self._queue or len(self._compiling) < self._settings.num_workers:
            return None
        since = max(self._compiling.values())
        return max(0.0, since + self._settings.relief_after_s - time.monotonic())

    def _served(self, work: Work, worker: CompileWorker | None) -> CompileWorker | None:
        """Compile one, whatever happens; returns the worker, where it is still good."""
        try:
            return self._serve(work, self._crew.ready(worker))
        except Exception:
            log.exception("compiling a grammar failed")
            return None
        finally:
            # Whatever happened, nobody waits for ever; a work that is settled stays as it is.
            self._settle(work, internal("compiling the grammar failed", work))

    def _serve(self, work: Work, worker: CompileWorker | None) -> CompileWorker | None:
        began = time.monotonic()
        with self._lock:
            self._compiling[threading.get_ident()] = began
            self._lock.notify_all()
        try:
            outcome, worker = self._asked(work, worker)
        finally:
            with self._lock:
                del self._compiling[threading.get_ident()]
        self._note(outcome, time.monotonic() - began)
        self._settle(work, outcome)
        self._outcomes.write(work.key, outcome)
        return worker

    def _asked(
        self, work: Work, worker: CompileWorker | None
    ) -> tuple[Outcome, CompileWorker | None]:
        """An outcome, and the worker, where it is still good.

        A worker that is killed from outside is no fault of the grammar: that gets a second try.
        """
        for is_last in (False, True):
            if worker is None:
                return internal("the grammar compiler does not start", work), None
            try:
                worker.learn(work.vocabulary)
                answer = worker.compile(work.job)
            except TookTooMuch:
                self._crew.drop(worker)
                self._count("killed_processor")
                limit = f"{self._limits.processor_limit_s:g} s of processor time"
                return too_complex(f"compiling takes more than {limit}", work), None
            except TookTooLong as error:
                self._crew.drop(worker)
                self._count("killed_time")
                if error.starting:
                    return internal("the grammar compiler takes too long to start", work), None
                return delayed(self._delay, work), None
            except Died as error:
                self._crew.drop(worker)
                if not is_last and error.from_outside:
                    self._count("killed_outside")
                    worker = self._crew.ready(None)
                    continue
                self._count("crashed")
                return too_complex("the compiler crashed on it or ran out of memory", work), None
            if answer.retire:
                self._count("retired")
                self._crew.drop(worker)
            kept = None if answer.retire else worker
            return (answer.grammar if isinstance(answer, frames.Done) else answer), kept
        raise AssertionError("the last try returns")

    @property
    def _delay(self) -> str:
        limits = self._limits
        return (
            f"the machine is busy, {limits.wall_limit_s:g} s were not enough to give its compiler "
            f"{limits.processor_limit_s:g} s of processor time"
        )

    def _note(self, outcome: Outcome, seconds: float) -> None:
        if isinstance(outcome, CompiledGrammar):
            self._count("compiled")
        else:
            own = issubclass(by_code(outcome.code), BadRequest)
            self._count("refused" if own else "failed")
        with self._lock:
            self._seconds += seconds
        if self._observe is not None:
            self._observe(outcome.backend if isinstance(outcome, CompiledGrammar) else "", seconds)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _outcomes(settings: PoolSettings) -> Outcomes:
    folder = settings.cache_dir
    return Outcomes(
        cache_bytes=settings.cache_bytes,
        refusals_kept_s=settings.refusals_kept_s,
        disk=DiskCache(folder, budget_bytes=settings.disk_bytes) if folder else None,
    )


def _given(outcome: Outcome, vocabulary: Vocabulary) -> CompiledGrammar:
    """The grammar, or its error as an exception of its own."""
    if isinstance(outcome, CompiledGrammar):
        return replace(outcome, added_tokens=vocabulary.added) if vocabulary.added else outcome
    error_class = by_code(outcome.code)
    if issubclass(error_class, Overloaded):
        raise error_class(outcome.message)
    raise error_class(outcome.message, param=outcome.param)


def _done(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
