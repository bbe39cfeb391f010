"""Our engine as one of a comparison, started as `plait serve` starts it; and the probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plait.platform.bench.engine_runner import EngineRunner
from plait.platform.bench.machine import versions
from plait.platform.config import Options
from plait.platform.intake import Intake
from plait.platform.start import start_engine

Step = Callable[[list[tuple[int, list[int]]]], None]


class Engine:
    """A model loaded by us."""

    def __init__(self, weights: str, **options: Any) -> None:
        """`options` are fields of `Options`."""
        started = start_engine(Options(model=weights, progress=False, **options), light=True)
        config = started.engine.config
        self._runner = EngineRunner(started.engine, Intake(config, started.tokenizer))
        self.versions = versions("plait", "torch") | {
            "executor": config.model.executor,
            "dtype": config.model.dtype,
            "weight_bytes": str(config.model.weight_bytes),
        }

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int, step: Step) -> None:
        """See `worker`."""
        for tokens in self._runner.steps(prompts, output_tokens):
            step(tokens)
