"""Our engine as one of a comparison, started as `plait serve` starts it; and the probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plait.platform.bench.local import LocalEngine
from plait.platform.bench.machine import versions
from plait.platform.config import Options

Step = Callable[[list[tuple[int, list[int]]]], None]


class Engine:
    """A model loaded by us."""

    def __init__(self, weights: str, **options: Any) -> None:
        """`options` are fields of `Options`."""
        self._engine = LocalEngine(Options(model=weights, progress=False, **options))
        self.versions = versions("plait", "torch") | self._engine.what_runs()

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int, step: Step) -> None:
        """See `worker`."""
        for tokens in self._engine.runner.steps(prompts, output_tokens):
            step(tokens)
