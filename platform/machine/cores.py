"""The cores of this machine that the process may use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from plait.platform.errors import ConfigError

if TYPE_CHECKING:
    from plait.platform.config import Options


def usable_cores() -> tuple[int, ...]:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    return tuple(sorted(affinity(0))) if affinity else tuple(range(os.cpu_count() or 1))


def num_threads(options: Options) -> int:
    """Threads to compute with: as asked, or one for each core."""
    return max(1, options.num_threads or len(usable_cores()))


def pinned_cores(options: Options) -> tuple[int, ...] | None:
    """The core on which each thread stays; None: wherever the system puts them.

    Raises `ConfigError` where there are fewer cores than threads.
    """
    if not options.pin_threads:
        return None
    cores, threads = usable_cores(), num_threads(options)
    if threads > len(cores):
        raise ConfigError(
            f"--pin-threads wants a core for each of {threads} threads, and this process may use "
            f"{len(cores)}: set --threads to that, or leave it out",
            param="pin_threads",
        )
    return cores[:threads]
