"""How much of the memory's rate a decode step reaches, by a model that no cache holds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from plait.platform.bench.explain import explain, table
from plait.platform.bench.local import LocalEngine
from plait.platform.bench.random_model import BITS, shape_for, write
from plait.platform.bench.stats import median
from plait.platform.bench.throughput import Plan
from plait.platform.bench.workload import Shape
from plait.platform.config import Options


def random_engine(options: Options, num_bytes: int) -> LocalEngine:
    """An engine with a random model whose matrices take `num_bytes` or a little more when packed.

    Its checkpoint, in bfloat16, and its packed weights are written to the system's temporary folder
    and deleted again.
    """
    from plait.platform.demo.embedded import model_path
    from plait.platform.text.tokenizer_files import read_tokenizer_files

    backend = read_tokenizer_files(model_path()).backend
    bits = BITS.get(options.quantization, BITS["none"])
    if options.dtype == "float32" and options.quantization not in BITS:
        bits = 32.0
    shape = shape_for(num_bytes, bits, backend.get_vocab_size())
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        write(shape, backend.to_str(), Path(folder))
        # Kept, though nobody starts this model again: what was kept lies in huge pages as a whole,
        # as in a server, what was not, in those of four kilobytes where a matrix is small.
        return LocalEngine(
            replace(options, model=folder, served_model_name="random-llama", packed_cache=cache)
        )


def measure(
    engine: LocalEngine, plan: Plan, tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[Table]]:
    """Decode alone, one sequence, again and again; the machine is probed before and after."""
    make = engine.prompts(None)
    shape = Shape(batch_size=1, input_tokens=plan.input_tokens, output_tokens=plan.output_tokens)
    rounds: list[dict[str, Any]] = []
    if plan.warm_up:
        explain(engine.runner, make(shape, -1), 4)
    stages: dict[str, Any] = {}
    probe = engine.probe()
    for repeat in range(plan.repeats):
        before = probe
        stages = explain(engine.runner, make(shape, plan.seed + repeat), plan.output_tokens)
        probe = engine.probe()
        decode = stages["decode"]
        read_bytes = engine.weight_bytes * decode.num_steps
        reached = read_bytes / decode.seconds / 1e9
        read = _between(before["read_gb_per_s"], probe["read_gb_per_s"])
        rounds.append(
            {
                "tokens_per_s": decode.num_tokens / decode.seconds,
                "gb_per_s": reached,
                "probes": [before, probe],
                "share": reached / read["median"],
                "share_of_best": reached / read["best"],
                # Beside the best, as neither has waited for others.
                "share_of_processor_time": read_bytes / decode.processor_s / 1e9 / read["best"],
                "decode": decode.as_dict(),
            }
        )
        tell(
            f"{repeat + 1}/{plan.repeats}: {reached:.1f} GB/s of {read['median']:.1f} "
            f"({reached / read['median']:.0%})"
        )
    result = {
        name: median([one[name] for one in rounds])
        for name in (
            *("tokens_per_s", "gb_per_s", "share", "share_of_best"),
            "share_of_processor_time",
        )
    }
    report = {"weight_bytes": engine.weight_bytes, "rounds": rounds} | result
    return report, [_table(report), table(1, stages, probe)]


def _between(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the machine gave about a round: on a shared one it changes within seconds."""
    return {name: (before[name] + after[name]) / 2 for name in before}


def _table(report: dict[str, Any]) -> Table:
    shown = Table(
        *(
            Column(title, justify="right")
            for title in ("weights", "tok/s", "GB/s", "of the probe", "by processor time")
        ),
        caption="decode of one sequence, medians; of the probe's median right before and after "
        "each round; by processor time of its best, where others had the cores too",
    )
    shown.add_row(
        f"{report['weight_bytes'] / 1e6:.0f} MB",
        f"{report['tokens_per_s']:.1f}",
        f"{report['gb_per_s']:.1f}",
        f"{report['share']:.0%}",
        f"{report['share_of_processor_time']:.0%}",
    )
    return shown
