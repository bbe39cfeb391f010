"""Figures of a served load: latency percentiles, throughput, goodput, errors, comparison."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.platform.bench.load import Pace, Sample, Target, run_load
from plait.platform.bench.stats import median, ratio, summary
from plait.platform.errors import ConfigError

GOALS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One pass over the prompts against one server."""

    samples: list[Sample]
    seconds: float

    @property
    def output_rate(self) -> float:
        """Output tokens per second of all requests that succeeded."""
        return sum(s.num_output_tokens for s in self.samples if not s.error) / self.seconds


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """Seconds by name of "ttft:500" (milliseconds), vLLM's `--goodput` spelling."""
    goals = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            goals[name] = float(limit) / 1000
        except ValueError:
            raise ConfigError(
                f"--goodput wants NAME:MILLISECONDS, such as ttft:500, not {text!r}"
            ) from None
        if name not in GOALS:
            raise ConfigError(f"--goodput knows {', '.join(GOALS)}, not {name!r}")
    return goals


def meets(sample: Sample, goals: Mapping[str, float]) -> bool:
    """Whether a request succeeded within every goal."""
    return not sample.error and all(getattr(sample, f"{n}_s") <= s for n, s in goals.items())


def report(rounds: Sequence[Round], goals: Mapping[str, float]) -> dict[str, Any]:
    """All figures of one server over its rounds; times in milliseconds."""
    samples = [sample for round_ in rounds for sample in round_.samples]
    good = [sample for sample in samples if not sample.error]
    seconds = sum(round_.seconds for round_ in rounds)
    figures: dict[str, Any] = {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": median([round_.output_rate for round_ in rounds]),
        "prompt_tokens": sum(s.num_prompt_tokens for s in good),
        "output_tokens": sum(s.num_output_tokens for s in good),
        "ttft_ms": summary([s.ttft_s for s in good], scale=1000),
        "itl_ms": summary([gap for s in good for gap in s.gaps_s], scale=1000),
        "tpot_ms": summary([s.tpot_s for s in good if s.num_output_tokens > 1], scale=1000),
        "e2e_ms": summary([s.e2e_s for s in good], scale=1000),
        "error_messages": dict(Counter(s.error for s in samples if s.error).most_common(5)),
    }
    if goals:
        figures["goodput_per_s"] = sum(meets(s, goals) for s in samples) / seconds
    return figures


def compare(ours: Sequence[Round], theirs: Sequence[Round]) -> dict[str, float]:
    """Ratios of medians, above 1 where the first server is better."""
    ttft = [[s.ttft_s for r in side for s in r.samples if not s.error] for side in (ours, theirs)]
    itl = [[g for r in side for s in r.samples for g in s.gaps_s] for side in (ours, theirs)]
    return {
        "output_tokens_per_s": ratio(
            [r.output_rate for r in ours], [r.output_rate for r in theirs]
        ),
        "ttft": ratio(ttft[1], ttft[0]),
        "itl": ratio(itl[1], itl[0]),
    }


def measure(
    targets: Sequence[Target], batches: Sequence[Sequence[str]], pace: Pace, *, warm_up: bool = True
) -> list[list[Round]]:
    """Rounds per target: each batch of prompts goes to every target before the next batch.

    The servers take turns in going first, so that neither gains from the machine's moods.
    """
    if warm_up:
        for target in targets:
            asyncio.run(run_load(target, batches[0][:1], Pace(concurrency=1)))
    rounds: list[list[Round]] = [[] for _ in targets]
    for number, prompts in enumerate(batches):
        order = list(range(len(targets)))
        for index in order if number % 2 == 0 else reversed(order):
            samples, seconds = asyncio.run(run_load(targets[index], prompts, pace))
            rounds[index].append(Round(samples=samples, seconds=seconds))
    return rounds
