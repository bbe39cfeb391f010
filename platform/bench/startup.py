"""Seconds from a command to its first token, each time in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from plait.platform.bench.stats import median
from plait.platform.errors import EngineDied

_MAIN = "from plait.platform.cli.main import app; app()"
_LAST_LINES = 3


def measure(arguments: Sequence[str], repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """`plait complete` with `arguments`, up to the first text; the first run may fill caches."""
    seconds: list[float] = []
    for number in range(1 + repeats):
        seconds.append(_first_text(arguments))
        what = "with whatever is cached" if number == 0 else f"{number}/{repeats}"
        tell(f"{what}: {seconds[-1]:.2f} s")
    return {"first_s": seconds[0], "measured_s": seconds[1:], "median_s": median(seconds[1:])}


def _first_text(arguments: Sequence[str]) -> float:
    command = [sys.executable, "-c", _MAIN, "complete", "Once upon a time", "--stream"]
    command += ["--max-tokens", "2", "--temperature", "0", "--no-progress", *arguments]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None, "it was asked for"
        assert process.stderr is not None, "it was asked for"
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
        said = process.stderr.read().decode(errors="replace").strip().splitlines()
    if not first or process.returncode != 0:
        raise EngineDied(f"plait complete said nothing: {' / '.join(said[-_LAST_LINES:])}")
    return seconds
