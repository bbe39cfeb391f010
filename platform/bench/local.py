"""The engine in this process, for benchmarks: started as `plait serve` starts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.platform.bench import machine
from plait.platform.bench.copying import copying_texts
from plait.platform.bench.engine_runner import EngineRunner
from plait.platform.bench.explain import Stage, explain
from plait.platform.bench.speculation import WITH, WITHOUT, CountingRunner, Workload
from plait.platform.bench.throughput import Plan, PromptMaker
from plait.platform.bench.timing import Runner
from plait.platform.bench.workload import Shape, random_token_prompts, texts_of_file
from plait.platform.config import Options
from plait.platform.core import Speculation
from plait.platform.intake import Intake
from plait.platform.machine import probing
from plait.platform.machine.cores import usable_cores
from plait.platform.start import start_engine


class LocalEngine:
    """A started engine, and prompts in its vocabulary."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._started = start_engine(options)
        self._config = self._started.engine.config
        self.runner = EngineRunner(
            self._started.engine, Intake(self._config, self._started.tokenizer)
        )

    @property
    def name(self) -> str:
        """The model's served name."""
        return self._config.model.name

    def prompts(self, file: str | None) -> PromptMaker:
        """Makes prompts: lines of a file, or random tokens of the vocabulary."""
        if file is not None:
            tokenizer, path = self._started.tokenizer, Path(file)
            return lambda shape, _: [
                tokenizer.encode(text) for text in texts_of_file(path, shape.batch_size)
            ]
        return self._random_prompts

    def with_adapters(self, count: int, rank: int) -> Runner:
        """The same engine, where each request of a batch has one of `count` random adapters."""
        from plait.platform.bench.random_adapters import load_random_adapters

        return EngineRunner(
            self._started.engine,
            Intake(self._config, self._started.tokenizer),
            name=f"{count} adapters",
            adapters=load_random_adapters(self._started, count=count, rank=rank),
        )

    def with_and_without_drafts(self, temperature: float) -> tuple[CountingRunner, CountingRunner]:
        """The same engine, whose requests want drafts or none."""
        engine, intake = self._started.engine, Intake(self._config, self._started.tokenizer)
        drafting, plain = (
            CountingRunner(
                EngineRunner(
                    engine,
                    intake,
                    name=name,
                    speculation=Speculation(enabled=enabled),
                    temperature=temperature,
                ),
                lambda: engine.stats,
            )
            for name, enabled in ((WITH, True), (WITHOUT, False))
        )
        return drafting, plain

    def workloads(self, file: str | None) -> list[Workload]:
        """Without and with something to copy; or what a file has."""
        if file is not None:
            greedy = self.with_and_without_drafts(0.0)
            return [Workload(name="file", prompts=self.prompts(file), runners=greedy)]
        # Greedy answers to random tokens soon repeat themselves, which is copying too.
        drawn, greedy = self.with_and_without_drafts(1.0), self.with_and_without_drafts(0.0)
        return [
            Workload(name="random", prompts=self._random_prompts, runners=drawn),
            Workload(name="copying", prompts=self._copying_prompts, runners=greedy),
        ]

    def facts(self) -> dict[str, Any]:
        """What a report says about model and machine."""
        model, scheduler = self._config.model, self._config.scheduler
        return {
            "machine": machine.facts(),
            "model": {
                "name": model.name,
                "architecture": model.architecture,
                "dtype": model.dtype,
                "executor": model.executor,
                "weight_bytes": model.weight_bytes,
            },
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        }

    def explain(
        self, plan: Plan, make: PromptMaker, tell: Callable[[str], None]
    ) -> list[tuple[int, dict[str, Stage], dict[str, Any]]]:
        """By batch size: the parts of prefill and decode, and what the machine gave just before."""
        found = []
        for size in plan.batch_sizes:
            shape = Shape(
                batch_size=size, input_tokens=plan.input_tokens, output_tokens=plan.output_tokens
            )
            tell(f"batch {size}: where the time goes")
            reached, prompts = self.probe(), make(shape, plan.seed - 1)
            found.append((size, explain(self.runner, prompts, plan.output_tokens), reached))
        return found

    def probe(self) -> dict[str, Any]:
        """What the machine gives right now, by as many threads as the engine computes with."""
        return probing.reached(usable_cores()[: torch.get_num_threads()]).as_dict()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed weights; a decode step reads them once."""
        return self._config.model.weight_bytes

    def _copying_prompts(self, shape: Shape, seed: int) -> list[list[int]]:
        tokenizer = self._started.tokenizer
        texts = copying_texts(shape, lambda text: len(tokenizer.encode(text)), seed)
        if not tokenizer.has_chat_template:
            return [tokenizer.encode(text + "\n\n") for text in texts]
        return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]

    def _random_prompts(self, shape: Shape, seed: int) -> list[list[int]]:
        # The tokenizer's vocabulary, not the model's: rows of padding are no text.
        vocab_size = min(self._config.model.vocab_size, self._started.tokenizer.vocab_size)
        avoid = self._config.model.eos_token_ids
        return random_token_prompts(shape, vocab_size=vocab_size, avoid=avoid, seed=seed)
