"""The pool's end of one compile worker: start it, ask it, kill it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from plait.structured import frames

if TYPE_CHECKING:
    from plait.structured.vocabulary import Vocabulary

_MAX_VOCABULARIES = 8  # then it is replaced; each takes some 50 MB

# One thread of each library, and one arena of malloc: what a worker reserves is what it uses.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class WorkerLost(Exception):
    """The worker is dead now; it has been killed, or has died of its job."""


class TookTooMuch(WorkerLost):
    """It ended at a job's limit of processor time: the job is too much on any machine."""


class TookTooLong(WorkerLost):
    """It was killed by the clock, at a job or, `starting`, at getting ready.

    Of its processor time there was some left: it got none, or waited for something.
    """

    def __init__(self, *, starting: bool) -> None:
        super().__init__("at the limit of time")
        self.starting = starting


class Died(WorkerLost):
    """It ended by itself; `returncode` is negative for a signal."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"returncode {returncode}")
        self.returncode = returncode

    @property
    def from_outside(self) -> bool:
        """Whether something else ended it: an operator, or the system short of memory."""
        return self.returncode in (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What one worker may take."""

    processor_limit_s: float  # for a job, of user and system together
    wall_limit_s: float  # from the question to the answer, whoever else uses the processor
    memory_bytes: int  # of address space beyond what an idle worker has
    start_limit_s: float = 60.0  # to load the libraries, on a busy machine


class CompileWorker:
    """A child process. One thread uses it at a time; any may `kill` it."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "plait.structured.compile_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
            )
        self._link = ours
        self._known: set[str] = set()
        self._start = frames.Start(
            memory_bytes=limits.memory_bytes,
            processor_limit_s=limits.processor_limit_s,
            wall_limit_s=limits.wall_limit_s,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    @property
    def is_full(self) -> bool:
        """Whether it has learned so many vocabularies that it should be replaced."""
        return len(self._known) >= _MAX_VOCABULARIES

    def learn(self, vocabulary: Vocabulary) -> None:
        """Get it ready for jobs of a vocabulary. Raises `WorkerLost`."""
        if vocabulary.digest in self._known:
            return
        # It reads nothing before Python itself has started.
        deadline = time.monotonic() + self._limits.start_limit_s
        if not self._known:
            self._tell(self._start, deadline, starting=True)
        message = frames.Learn(digest=vocabulary.digest, vocabulary=vocabulary.to_bytes())
        self._tell(message, deadline, starting=True)
        self._hear(deadline, starting=True)
        self._known.add(vocabulary.digest)

    def compile(self, job: frames.Job) -> frames.Done | frames.Refused:
        """Have a job done. Raises `WorkerLost`, at the latest when the limit of time is over."""
        deadline = time.monotonic() + self._limits.wall_limit_s
        self._tell(job, deadline)
        answer = self._hear(deadline)
        assert isinstance(answer, frames.Done | frames.Refused)
        return answer

    def kill(self) -> int:
        """End it, if it has not ended, and return its returncode."""
        self._process.kill()
        self._link.close()
        return self._process.wait()

    def _tell(self, message: frames.ToWorker, deadline: float, *, starting: bool = False) -> None:
        self._link.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            frames.send(self._link, message)
        except TimeoutError:
            self.kill()
            raise TookTooLong(starting=starting) from None
        except OSError:
            raise self._lost() from None

    def _hear(self, deadline: float, *, starting: bool = False) -> frames.FromWorker:
        link = _Deadline(self._link, deadline)
        try:
            answer: frames.FromWorker = frames.receive(link, frames.FromWorker)  # type: ignore[arg-type]
        except TimeoutError:
            self.kill()
            raise TookTooLong(starting=starting) from None
        except (EOFError, OSError, msgspec.MsgspecError):
            raise self._lost() from None
        return answer

    def _lost(self) -> WorkerLost:
        """It has closed its end: it is about to end, or something is badly wrong."""
        try:
            returncode = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            returncode = self.kill()
        self._link.close()
        if returncode == -signal.SIGALRM:  # its own clock was read before ours
            return TookTooLong(starting=False)
        return TookTooMuch() if returncode == -signal.SIGPROF else Died(returncode)


class _Deadline:
    """A socket whose reads all end at one moment."""

    def __init__(self, link: socket.socket, deadline: float) -> None:
        self._link = link
        self._deadline = deadline

    def recv(self, size: int) -> bytes:
        """As a socket's. Raises TimeoutError at the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._link.settimeout(left)
        return self._link.recv(size)
