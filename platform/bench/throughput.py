"""Offline throughput by batch size, and its ratio to a peer that takes turns with us."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plait.platform.bench.stats import median, ratio_in_turns
from plait.platform.bench.timing import Runner, Timing
from plait.platform.bench.workload import Shape

RATES = ("decode_rate", "output_rate", "prefill_rate")
# Prompts of one measurement: shape and seed in, token ids out.
PromptMaker = Callable[[Shape, int], list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    batch_sizes: tuple[int, ...]
    input_tokens: int
    output_tokens: int
    repeats: int
    warm_up: bool = True
    seed: int = 0


def measure(
    plan: Plan, runners: Sequence[Runner], prompts: PromptMaker, tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One entry per batch size: medians of every runner, and ratios of the first to the others."""
    results = []
    for batch_size in plan.batch_sizes:
        shape = Shape(
            batch_size=batch_size, input_tokens=plan.input_tokens, output_tokens=plan.output_tokens
        )
        timings = _take_turns(plan, shape, runners, prompts, tell)
        results.append({"batch_size": batch_size} | figures(timings))
    return results


def _take_turns(
    plan: Plan,
    shape: Shape,
    runners: Sequence[Runner],
    prompts: PromptMaker,
    tell: Callable[[str], None],
) -> dict[str, list[Timing]]:
    """Every runner gets the same prompts in each repeat, new ones in the next."""
    if plan.warm_up:
        for runner in runners:
            tell(f"batch {shape.batch_size}: {runner.name} warms up")
            runner.run(prompts(shape, plan.seed + plan.repeats), min(8, shape.output_tokens))
    timings: dict[str, list[Timing]] = {runner.name: [] for runner in runners}
    for repeat in range(plan.repeats):
        asked = prompts(shape, plan.seed + repeat)
        for runner in runners if repeat % 2 == 0 else reversed(runners):
            timing = runner.run(asked, shape.output_tokens)
            timings[runner.name].append(timing)
            tell(
                f"batch {shape.batch_size}, {repeat + 1}/{plan.repeats}: {runner.name} "
                f"{timing.decode_rate:.1f} tok/s decode, {timing.output_rate:.1f} in all"
            )
    return timings


def figures(timings: dict[str, list[Timing]]) -> dict[str, Any]:
    """Medians by runner and rate, with all measurements; ratios of the first runner to others."""
    rates = {
        name: {rate: [getattr(t, rate) for t in measured] for rate in RATES}
        for name, measured in timings.items()
    }
    first, *others = rates
    return {
        "runners": {
            name: {rate: median(values) for rate, values in by_rate.items()}
            | {"ttft_s": median([t.prefill_s for t in timings[name]]), "measured": by_rate}
            for name, by_rate in rates.items()
        },
        "ratios": {
            other: {rate: ratio_in_turns(rates[first][rate], rates[other][rate]) for rate in RATES}
            for other in others
        },
    }
