"""What a figure was measured on: it goes into every report, since figures mean nothing without."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

from plait.platform.errors import ConfigError


def pin_to_cores(cores: tuple[int, ...]) -> None:
    """Keep this process to `cores`. Must come before torch starts its threads."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system cannot pin a process to cores: drop --cores", param="cores")
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        usable = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(
            f"--cores {cores}: this process may use {usable}", param="cores"
        ) from None


def first_core() -> tuple[int, ...]:
    """The first core this process may use; none where a process cannot be pinned."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return (min(os.sched_getaffinity(0)),)


def facts() -> dict[str, Any]:
    """The machine, the versions, and the memory bandwidth reached right now."""
    import torch

    return {
        "processor": processor(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "threads": torch.get_num_threads(),
        "read_gb_per_s": round(read_bandwidth(), 1),
        "python": platform.python_version(),
        "versions": versions("plait", "torch", "transformers"),
    }


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def read_bandwidth(megabytes: int = 256) -> float:
    """GB/s at which a sum reads memory: the floor under every decode step; best of three."""
    import torch

    data = torch.ones(megabytes << 18)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.numel() * 4 / best / 1e9


def processor() -> str:
    """The processor's name, as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
