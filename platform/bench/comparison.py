"""Engines compared: each in its own process, all on the same cores, prompts and weights, in turns.

A round measures one batch size: the machine is probed, then every engine answers the same prompts.
Rounds go through the batch sizes and start again, each time with another engine first, so that an
hour in which the machine is slow is slow for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plait.platform.bench.entries import Entry
from plait.platform.bench.stats import median, ratio_in_turns
from plait.platform.bench.throughput import Plan
from plait.platform.bench.timing import StepClock, Timing
from plait.platform.bench.worker_process import WorkerFailed
from plait.platform.bench.workload import Shape

RATES = ("decode_rate", "prefill_rate", "output_rate")
_PROBE_S = 0.4


class Worker(Protocol):
    """An engine that answers requests: a process, or a test's fake."""

    started_s: float

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """See `WorkerProcess`."""

    def close(self) -> None:
        """End it."""


@dataclass(slots=True, kw_only=True)
class Contender:
    """One engine of a running comparison."""

    entry: Entry
    worker: Worker
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One batch answered: by the clock on the wall, and by the processor's."""

    wall: Timing
    processor: Timing
    first_tokens: tuple[int, ...]  # of each sequence

    def as_dict(self) -> dict[str, Any]:
        """Rates and seconds, for reports."""
        return {
            name: {rate: getattr(timing, rate) for rate in RATES}
            | {"prefill_s": timing.prefill_s, "total_s": timing.total_s}
            for name, timing in (("wall", self.wall), ("processor", self.processor))
        }


def load(
    contender: Contender, weights: str, options: dict[str, Any], prompt: Sequence[int]
) -> None:
    """Load the engine and have it say one token; notes how long both took."""
    answer = contender.worker.ask("load", weights=weights, options=options)
    contender.worker.ask("run", prompts=[list(prompt)], output_tokens=1)
    contender.facts |= {
        "versions": answer["versions"],
        "load_s": round(answer["seconds"], 2),
        "first_token_s": round(time.perf_counter() - contender.worker.started_s, 2),
    }


def measure(
    plan: Plan,
    contenders: list[Contender],
    probe: Callable[[float], dict[str, Any]],
    prompts: Callable[[Shape, int], list[list[int]]],
    tell: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Round after round. An engine that fails is said so, and left out from then on."""
    running = list(contenders)
    for repeat in range(plan.repeats):
        for batch_size in plan.batch_sizes:
            shape = Shape(
                batch_size=batch_size,
                input_tokens=plan.input_tokens,
                output_tokens=plan.output_tokens,
            )
            asked = prompts(shape, plan.seed + repeat)
            reached = probe(_PROBE_S)
            entry: dict[str, Any] = {"repeat": repeat, "batch_size": batch_size, "probe": reached}
            entry["load_average"] = _load_average()
            tell(
                f"round {repeat + 1}/{plan.repeats}, batch {batch_size}: memory gives "
                f"{reached['read_gb_per_s']['median']:.1f} GB/s"
            )
            answered = _one_round(running, asked, plan.output_tokens, tell)
            entry["engines"] = {name: one.as_dict() for name, one in answered.items()}
            entry["first_tokens"] = {name: one.first_tokens for name, one in answered.items()}
            yield entry
            if running:
                running.append(running.pop(0))


def _one_round(
    running: list[Contender],
    prompts: list[list[int]],
    output_tokens: int,
    tell: Callable[[str], None],
) -> dict[str, Answered]:
    answered: dict[str, Answered] = {}
    for contender in list(running):
        name = contender.entry.name
        try:
            steps = contender.worker.ask("run", prompts=prompts, output_tokens=output_tokens)
            answered[name] = read_steps(steps["steps"], prompts, output_tokens)
        except (WorkerFailed, RuntimeError) as error:
            running.remove(contender)
            contender.facts["failed"] = str(error)
            tell(f"  {name} failed: {error}")
            continue
        wall = answered[name].wall
        tell(f"  {name:<20} {wall.decode_rate:8.1f} decode {wall.prefill_rate:8.0f} prefill")
    return answered


def read_steps(
    steps: Sequence[tuple[float, float, list[tuple[int, list[int]]]]],
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
) -> Answered:
    """Timings from what a worker recorded; raises where it answered other than it was asked."""
    num_prompt_tokens = sum(map(len, prompts))
    wall = StepClock(len(prompts), num_prompt_tokens, 0.0)
    processor = StepClock(len(prompts), num_prompt_tokens, 0.0)
    answers: list[list[int]] = [[] for _ in prompts]
    for wall_s, processor_s, tokens in steps:
        for sequence, ids in tokens:
            wall.tokens(sequence, len(ids), wall_s)
            processor.tokens(sequence, len(ids), processor_s)
            answers[sequence] += ids
    if any(len(answer) != output_tokens for answer in answers):
        raise RuntimeError(
            f"answers have {sorted({len(a) for a in answers})} tokens, not {output_tokens}"
        )
    first = tuple(answer[0] for answer in answers)
    return Answered(wall=wall.timing(), processor=processor.timing(), first_tokens=first)


def results(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians by batch size and engine, by both clocks, and how many first tokens are usual."""
    found = []
    for batch_size in dict.fromkeys(one["batch_size"] for one in rounds):
        own = [one for one in rounds if one["batch_size"] == batch_size]
        names = dict.fromkeys(name for one in own for name in one["engines"])
        found.append(
            {
                "batch_size": batch_size,
                "read_gb_per_s": median([one["probe"]["read_gb_per_s"]["median"] for one in own]),
                "engines": {name: _medians(name, own) for name in names},
            }
        )
    return found


def _medians(name: str, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = [one for one in rounds if name in one["engines"]]
    figures: dict[str, Any] = {"rounds": len(own)}
    for clock in ("wall", "processor"):
        figures[clock] = {
            rate: median([one["engines"][name][clock][rate] for one in own]) for rate in RATES
        }
    figures["usual_first_tokens"] = sum(map(_agreement, own, [name] * len(own))) / len(own)
    return figures


def _agreement(one: dict[str, Any], name: str) -> float:
    """The share of sequences whose first token is what most engines said."""
    by_engine = list(one["first_tokens"].values())
    same = 0
    for sequence, token in enumerate(one["first_tokens"][name]):
        said = [tokens[sequence] for tokens in by_engine]
        same += said.count(token) == max(map(said.count, said))
    return same / len(one["first_tokens"][name])


def ratio(
    rounds: Sequence[dict[str, Any]], ours: str, theirs: str, figure: tuple[int, str, str]
) -> float:
    """How many times as fast: the median over rounds of what both did in the same one.

    `figure`: batch size, rate and clock.
    """
    batch_size, rate, clock = figure
    both = [
        one["engines"]
        for one in rounds
        if one["batch_size"] == batch_size and {ours, theirs} <= one["engines"].keys()
    ]
    return ratio_in_turns(
        *([engines[name][clock][rate] for engines in both] for name in (ours, theirs))
    )


def _load_average() -> float | None:
    """How many processes wanted a core in the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
