"""The machine itself: what loads and products reach right now, on the same cores as the engines."""

from __future__ import annotations

import os
from typing import Any

from plait.platform.bench.machine import versions
from plait.platform.machine import probing


class Engine:
    """Measures and runs nothing."""

    def __init__(self, weights: str, **options: Any) -> None:
        del weights, options
        self.versions = versions("plait")

    def probe(self, seconds: float) -> dict[str, Any]:
        """Rates of all cores that this process may use."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        return probing.reached(cores, seconds=seconds).as_dict()
