"""A process that compiles grammars: `python -m plait.structured.compile_worker FD`.

It reads frames from a socket and may be killed at any moment. By itself it ends when its parent is
gone, when a job has used up its processor time or takes far too long, and when memory runs out. It
never loads torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from functools import lru_cache
from typing import Any

from plait.platform.errors import GrammarTooComplex, InternalError, PlaitError
from plait.structured import frames
from plait.structured.compiler import Compiler
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.vocabulary import Vocabulary

_NICE = 5  # steps come first, but a busy machine must not starve a compile past its limit
_SELF_DESTRUCT_S = 1.0  # beyond the limit at which the pool kills it
_UNTIDY = 10_000  # objects that may be left behind before they are looked through
_TIDIED_WHOLLY_EVERY = 32  # such looks: mostly those that are new are enough


def main() -> int:
    """Serve until the socket ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent decides
    for timer in (signal.SIGPROF, signal.SIGALRM):  # whatever the parent does with its own
        signal.signal(timer, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    _end_with_parent()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    link = socket.socket(fileno=int(sys.argv[1]))
    try:
        start = frames.receive(link, frames.ToWorker)
        Worker(link, start).serve()
    except (EOFError, OSError):
        return 0  # the pool has closed
    return 0


class Worker:
    """Compilers by vocabulary, and the bounds they work within."""

    def __init__(self, link: socket.socket, start: frames.Start) -> None:
        self._link = link
        self._start = start
        self._compilers: dict[str, Compiler] = {}
        self._ready_bytes = 0
        self._num_tidied = 0

    def serve(self) -> None:
        """Answer frame after frame."""
        while True:
            message = frames.receive(self._link, frames.ToWorker)
            if isinstance(message, frames.Learn):
                self._learn(message)
                frames.send(self._link, frames.Ready())
                _silence()
            elif isinstance(message, frames.Job):
                frames.send(self._link, self._answer(message))
                self._tidy()

    def _learn(self, message: frames.Learn) -> None:
        _limit_memory(None)
        vocabulary = Vocabulary.from_bytes(message.vocabulary)
        compiler = Compiler(vocabulary, clock=time.thread_time)
        compiler.warm()
        # What is loaded by now stays: a collection that looks at it costs more than a compile.
        gc.freeze()
        gc.disable()
        self._compilers[message.digest] = compiler
        self._ready_bytes = _address_space_bytes()
        _limit_memory(self._ready_bytes + self._start.memory_bytes)

    def _tidy(self) -> None:
        """Collect what jobs have left behind, now that nobody waits for it."""
        if gc.get_count()[0] < _UNTIDY:
            return
        self._num_tidied += 1
        gc.collect(1 if self._num_tidied % _TIDIED_WHOLLY_EVERY else 2)

    def _answer(self, job: frames.Job) -> frames.Done | frames.Refused:
        # A timer's default action ends the process even inside C++ code. The first counts what the
        # job takes of the processor: the parent tells the end by its signal. The second is for a
        # job that waits for ever, with no parent left to see it.
        signal.setitimer(signal.ITIMER_PROF, self._start.processor_limit_s)
        signal.setitimer(signal.ITIMER_REAL, self._start.wall_limit_s + _SELF_DESTRUCT_S)
        try:
            grammar = self._compilers[job.digest].compile(_spec(job))
            return frames.Done(grammar=grammar, retire=self._has_grown())
        except MemoryError:
            return _refused(GrammarTooComplex("it takes too much memory to compile"), job, True)
        except PlaitError as error:
            return _refused(error, job, self._has_grown())
        except Exception as error:  # noqa: BLE001 - the pool tells the user, and this one retires
            text = f"the grammar compiler failed ({type(error).__name__})"
            return _refused(InternalError(text), job, True)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _has_grown(self) -> bool:
        """Whether half of the memory is gone, to the rules that grammars share above all."""
        return _address_space_bytes() - self._ready_bytes > self._start.memory_bytes // 2


def _spec(job: frames.Job) -> GrammarSpec:
    return GrammarSpec(
        kind=GrammarKind(job.kind),
        content=json.loads(job.content),
        param=job.param,
        strict=job.strict,
        options=json.loads(job.options),
    )


def _refused(error: PlaitError, job: frames.Job, retire: bool) -> frames.Refused:
    return frames.Refused(
        code=error.code, message=error.message, param=error.param or job.param, retire=retire
    )


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _silence() -> None:
    """Both libraries write about users' grammars to the standard streams; no log should hold these.

    Up to here a failing start can be read there.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


@lru_cache(maxsize=1)
def _statm() -> int:
    """Opened once: it is looked at after each job."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def _address_space_bytes() -> int:
    """What counts against RLIMIT_AS; 0 where the system does not tell."""
    try:
        pages = int(os.pread(_statm(), 64, 0).split()[0])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _limit_memory(num_bytes: int | None) -> None:
    """Where it has no effect (macOS), the limit of time is what bounds a compile."""
    try:
        import resource
    except ImportError:
        return
    hard: Any = resource.getrlimit(resource.RLIMIT_AS)[1]
    unlimited = resource.RLIM_INFINITY
    soft = hard if num_bytes is None else num_bytes
    if hard != unlimited and soft != unlimited:
        soft = min(soft, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    sys.exit(main())
