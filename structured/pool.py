"""Compiling off the request's way: workers that can be killed, one compile per grammar, caches.

A compile cannot be interrupted inside its library, may take minutes for a schema of a few hundred
bytes, and may crash. So it happens in another process with limits, and the process is what is
given up. Requests wait here; the engine never does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from plait.platform.errors import BadRequest, Overloaded, by_code
from plait.structured import backends, frames
from plait.structured.cache import DiskCache, MemoryCache
from plait.structured.spec import CompiledGrammar
from plait.structured.work import (
    FairQueue,
    Outcome,
    Work,
    flight_key,
    internal,
    job_of,
    too_complex,
)
from plait.structured.worker import CompileWorker, Died, TookTooLong, WorkerLimits, WorkerLost

if TYPE_CHECKING:
    from plait.structured.spec import GrammarSpec
    from plait.structured.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_NUM_STARTS = 3  # of a worker, until the compiler counts as broken
_REFUSAL_BYTES = 4096  # what a kept refusal counts for


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Bounds of compiling."""

    num_workers: int = 1
    has_spare: bool = True  # a further one stands ready for when one is killed
    wall_limit_s: float = 2.0
    memory_bytes: int = 1 << 30
    max_pending: int = 64  # compiles that wait or run
    max_pending_per_tenant: int = 16
    cache_bytes: int = 256 << 20
    refusals_kept_s: float = 60.0
    cache_dir: Path | None = None  # None: nothing on disk
    disk_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts since the start; `counts` has compiled, refused, killed_*, hits_* and the like."""

    counts: dict[str, int]
    compile_seconds: float
    num_pending: int
    cache_bytes: int


class CompilePool:
    """Compiled grammars by content, from memory, disk or workers. Thread-safe.

    Nothing is started before the first grammar or `start`. Raises, for what it compiles, the
    router's errors; `GrammarTooComplex` beyond a limit; `Overloaded` when too many wait.
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
            wall_limit_s=self._settings.wall_limit_s, memory_bytes=self._settings.memory_bytes
        )
        self._compiled: MemoryCache[CompiledGrammar] = MemoryCache(self._settings.cache_bytes)
        self._refused: MemoryCache[tuple[frames.Refused, float]] = MemoryCache(4 << 20)
        self._disk = self._open_disk()
        self._version = _version()
        self._lock = threading.Condition()
        self._pending: dict[str, Work] = {}
        self._queue = FairQueue()
        self._counts: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._seconds = 0.0
        self._threads: list[threading.Thread] = []
        self._reader: ThreadPoolExecutor | None = None
        self._workers: set[CompileWorker] = set()
        self._spare: CompileWorker | None = None
        self._spare_thread: threading.Thread | None = None
        self._closed = False

    def _open_disk(self) -> DiskCache | None:
        folder = self._settings.cache_dir
        return DiskCache(folder, budget_bytes=self._settings.disk_bytes) if folder else None

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
            for number in range(self._settings.num_workers):
                thread = threading.Thread(
                    target=self._run, daemon=True, name=f"grammar-compile-{number}"
                )
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Kill the workers; whoever waits gets `Overloaded`. Safe to call twice."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            workers = [*self._workers, *([self._spare] if self._spare else [])]
            self._workers.clear()
            self._spare = None
            threads, self._threads = self._threads, []
            threads += [self._spare_thread] if self._spare_thread else []
        if self._reader is not None:
            self._reader.shutdown()
        for worker in workers:
            worker.kill()
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
                cache_bytes=self._compiled.num_bytes,
            )

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, the spare last."""
        with self._lock:
            spare = [self._spare] if self._spare else []
            return [worker.pid for worker in [*self._workers, *spare]]

    # --- caches and single flight ---

    def _submit(self, spec: GrammarSpec, tenant: str, vocabulary: Vocabulary) -> Future[Outcome]:
        job = job_of(spec, vocabulary)
        key = self._key(job)
        self.start()
        with self._lock:
            known = self._known(key, spec.param)
            if known is not None:
                return known
            self._check_room(tenant)
            work = Work(key=key, tenant=tenant, job=job, vocabulary=vocabulary, outcome=Future())
            self._pending[flight_key(key, spec.param)] = work
            self._tenants[tenant] += 1
            assert self._reader is not None
            self._reader.submit(self._look_up, work)
        return work.outcome

    def _known(self, key: str, param: str) -> Future[Outcome] | None:
        compiled = self._compiled.get(key)
        if compiled is not None:
            self._counts["hits_memory"] += 1
            return _done(compiled)
        flight = flight_key(key, param)
        refused = self._refused.get(flight)
        if refused is not None and refused[1] > time.monotonic():
            self._counts["hits_refused"] += 1
            return _done(refused[0])
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
        """On the reader's thread: from disk, or on to the workers. The disk raises nothing."""
        found = self._from_disk(work.key)
        if found is not None:
            with self._lock:
                self._counts["hits_disk"] += 1
            self._settle(work, found)
            return
        with self._lock:
            self._queue.put(work)
            self._lock.notify()

    def _from_disk(self, key: str) -> CompiledGrammar | None:
        content = self._disk.get(key) if self._disk else None
        if content is None:
            return None
        try:
            return msgspec.msgpack.decode(content, type=CompiledGrammar)
        except msgspec.MsgspecError:
            return None

    def _settle(self, work: Work, outcome: Outcome) -> None:
        """Keep an outcome and hand it to all who wait."""
        flight = flight_key(work.key, work.job.param)
        if isinstance(outcome, CompiledGrammar):
            self._compiled.put(work.key, outcome, len(outcome.payload) + 512)
        elif issubclass(by_code(outcome.code), BadRequest):
            until = time.monotonic() + self._settings.refusals_kept_s
            self._refused.put(flight, (outcome, until), _REFUSAL_BYTES)
        with self._lock:
            if self._pending.get(flight) is not work:
                return
            del self._pending[flight]
            self._tenants[work.tenant] -= 1
            if not self._tenants[work.tenant]:
                del self._tenants[work.tenant]
        work.outcome.set_result(outcome)

    def _key(self, job: frames.Job) -> str:
        """Over all that decides the outcome, but for the field that errors name."""
        content = [self._version, job.digest, job.kind, job.content, job.strict, job.options]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    # --- a worker's thread ---

    def _run(self) -> None:
        worker = self._ready(None)
        while True:
            with self._lock:
                while not self._closed and not self._queue:
                    self._lock.wait()
                if self._closed:
                    return
                work = self._queue.get()
            try:
                worker = self._serve(work, worker)
            except Exception:
                log.exception("compiling a grammar failed")
                worker = None
            finally:
                # Whatever happened, nobody waits for ever; a work that is settled stays as it is.
                self._settle(work, internal("compiling the grammar failed", work))

    def _serve(self, work: Work, worker: CompileWorker | None) -> CompileWorker | None:
        """Compile one; returns the worker to go on with."""
        worker = self._ready(worker)
        began = time.monotonic()
        outcome, worker = self._asked(work, worker)
        self._note(outcome, time.monotonic() - began)
        self._settle(work, outcome)
        if isinstance(outcome, CompiledGrammar) and self._disk is not None:
            self._disk.put(work.key, msgspec.msgpack.encode(outcome))
        return self._ready(worker)

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
            except TookTooLong as error:
                self._drop(worker)
                self._count("killed_time")
                if error.starting:
                    return internal("the grammar compiler takes too long to start", work), None
                text = f"compiling takes longer than {self._limits.wall_limit_s:g} s"
                return too_complex(text, work), None
            except Died as error:
                self._drop(worker)
                if not is_last and error.from_outside:
                    self._count("killed_outside")
                    worker = self._ready(None)
                    continue
                self._count("crashed")
                return too_complex("the compiler crashed on it or ran out of memory", work), None
            if answer.retire:
                self._count("retired")
                self._drop(worker)
            kept = None if answer.retire else worker
            return (answer.grammar if isinstance(answer, frames.Done) else answer), kept
        raise AssertionError("the last try returns")

    def _ready(self, worker: CompileWorker | None) -> CompileWorker | None:
        """The worker if it is good for more, else the spare or a new one; None if none starts."""
        if worker is not None and worker.alive and not worker.is_full:
            return worker
        if worker is not None:
            self._drop(worker)
        for _ in range(_NUM_STARTS):
            fresh = self._started()
            if fresh is not None:
                self._renew_spare()
                return fresh
        return None

    def _started(self) -> CompileWorker | None:
        """The spare or a new worker, ready; None if it does not start, or the pool is closed."""
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
        self._drop(fresh)
        return None

    def _drop(self, worker: CompileWorker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.kill()

    def _renew_spare(self) -> None:
        """On a thread of its own, for its libraries take a while to load."""
        with self._lock:
            if self._closed or not self._settings.has_spare or self._spare is not None:
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
            self._spare = spare

    def _note(self, outcome: Outcome, seconds: float) -> None:
        compiled = isinstance(outcome, CompiledGrammar)
        self._count("compiled" if compiled else "refused")
        with self._lock:
            self._seconds += seconds
        if self._observe is not None:
            self._observe(outcome.backend if isinstance(outcome, CompiledGrammar) else "", seconds)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _given(outcome: Outcome, vocabulary: Vocabulary) -> CompiledGrammar:
    """The grammar, or its error as an exception of its own."""
    if isinstance(outcome, CompiledGrammar):
        return replace(outcome, added_tokens=vocabulary.added) if vocabulary.added else outcome
    error_class = by_code(outcome.code)
    if error_class is Overloaded:
        raise Overloaded(outcome.message)
    raise error_class(outcome.message, param=outcome.param)


def _done(outcome: Outcome) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future


def _version() -> str:
    """Changes with the libraries and with each line of ours that decides what is compiled."""
    digest = hashlib.sha256()
    for name in backends.NAMES:
        digest.update(f"{name} {backends.version(name)}\n".encode())
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
