"""A worker of `peers/worker.py`, seen from here: one request at a time, and an end to waiting."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

_SCRIPT = Path(__file__).parent / "peers" / "worker.py"
_LAST_LINES = 3


class WorkerFailed(RuntimeError):
    """An engine under comparison raised, died or took too long; the message says what it said."""


class WorkerProcess:
    """An engine in a process of its own. Close it, or use it as a context."""

    def __init__(
        self, python: Path, peer: str, cores: Sequence[int], log: Path, *, timeout_s: float = 600
    ) -> None:
        """Start it; nothing is loaded yet.

        Args:
            python: Interpreter of the environment that has the engine.
            peer: Name of its module, without `_peer`.
            cores: That it may use; none: all.
            log: File for everything that it prints.
            timeout_s: Longest wait for an answer.
        """
        self.started_s = time.perf_counter()
        self._log = log
        self._timeout_s = timeout_s
        threads = str(len(cores)) if cores else str(os.cpu_count())
        # A Python variable of ours would lead other environments astray.
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OMP_"))}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), str(_SCRIPT), peer, ",".join(map(str, cores))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=ours
                | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
                | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """One request and its answer; raises `WorkerFailed`."""
        timer = threading.Timer(self._timeout_s, self._process.kill)
        timer.start()
        try:
            to, back = _pipes(self._process)
            to.write(json.dumps({"op": op} | request).encode() + b"\n")
            to.flush()
            line = back.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        if not line:
            raise WorkerFailed(
                f"its process ended, or took {self._timeout_s:.0f} s: {self._tail()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def close(self) -> None:
        """End it. Twice is once."""
        for pipe in _pipes(self._process):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tail(self) -> str:
        lines = self._log.read_text("utf-8", errors="replace").strip().splitlines()
        return " / ".join(lines[-_LAST_LINES:]) or "it printed nothing"


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdin is not None, "it was asked for"
    assert process.stdout is not None, "it was asked for"
    return process.stdin, process.stdout
