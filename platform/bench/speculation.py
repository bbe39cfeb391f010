"""What drafts bring: the same engine with and without them, in turns on the same prompts.

Beside the ratio of rates stands that of processor time, which says more where others use the
machine too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from plait.platform.bench.stats import ratio_in_turns
from plait.platform.bench.throughput import Plan, PromptMaker
from plait.platform.bench.throughput import measure as measure_throughput

if TYPE_CHECKING:
    from plait.platform.bench.engine_runner import EngineRunner
    from plait.platform.bench.timing import Timing
    from plait.platform.messages import Stats

WITH, WITHOUT = "drafts", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """Drafts of one batch, and what it took."""

    cpu_s: float  # of this process, prompts included
    num_runs: int  # runs of drafts that were verified
    by_source: dict[str, tuple[int, int]]  # verified, output

    @staticmethod
    def between(before: Stats, after: Stats, cpu_s: float) -> Drafted:
        """What came between two moments of an engine."""
        found = {}
        for source, (verified, output) in after.drafts.items():
            known = before.drafts.get(source, (0, 0))
            if verified > known[0]:
                found[source] = (verified - known[0], output - known[1])
        num_runs = after.num_draft_runs - before.num_draft_runs
        return Drafted(cpu_s=cpu_s, num_runs=num_runs, by_source=found)


class CountingRunner:
    """A runner that keeps what each of its runs drafted."""

    def __init__(self, runner: EngineRunner, stats: Callable[[], Stats]) -> None:
        self.name = runner.name
        self.runs: list[Drafted] = []
        self._runner = runner
        self._stats = stats

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Timing:
        """See `Runner.run`."""
        before, began_s = self._stats(), time.process_time()
        timing = self._runner.run(prompts, output_tokens)
        cpu_s = time.process_time() - began_s
        self.runs.append(Drafted.between(before, self._stats(), cpu_s))
        return timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts, and who answers them with drafts and without."""

    name: str
    prompts: PromptMaker
    runners: tuple[CountingRunner, CountingRunner]


def measure(
    plan: Plan, workloads: Sequence[Workload], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One entry per workload and batch size: rates of both, their ratio, and what was drafted."""
    results = []
    for workload in workloads:
        for size in plan.batch_sizes:
            tell(f"{workload.name} prompts, batch {size}")
            one = replace(plan, batch_sizes=(size,))
            (result,) = measure_throughput(one, workload.runners, workload.prompts, tell)
            with_drafts, without = (r.runs[-plan.repeats :] for r in workload.runners)
            cpu = ratio_in_turns([r.cpu_s for r in without], [r.cpu_s for r in with_drafts])
            result |= {"workload": workload.name, "cpu_ratio": cpu} | _sum(with_drafts)
            results.append(result)
    return results


def _sum(runs: Sequence[Drafted]) -> dict[str, Any]:
    by_source: dict[str, list[int]] = {}
    for run in runs:
        for source, counts in run.by_source.items():
            sums = by_source.setdefault(source, [0, 0])
            sums[0], sums[1] = sums[0] + counts[0], sums[1] + counts[1]
    num_runs = sum(run.num_runs for run in runs)
    output = sum(counts[1] for counts in by_source.values())
    return {
        "acceptance_length": 1 + output / num_runs if num_runs else None,
        "drafts": {s: {"verified": v, "accepted": a} for s, (v, a) in sorted(by_source.items())},
    }


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Decode rates without and with drafts, by workload and batch size."""
    shown = Table(
        "prompts",
        *(Column(t, justify="right") for t in ("batch", "none", "drafts", "ratio", "CPU", "a run")),
        "accepted of verified",
        caption=(
            "tokens per second once all prompts are done, medians; CPU: processor time without "
            "drafts over that with, prompts included; a run: tokens from a sequence's step with "
            "drafts"
        ),
    )
    for result in results:
        rates = {name: r["decode_rate"] for name, r in result["runners"].items()}
        length = result["acceptance_length"]
        shown.add_row(
            result["workload"],
            str(result["batch_size"]),
            f"{rates[WITHOUT]:.1f}",
            f"{rates[WITH]:.1f}",
            f"[bold]{result['ratios'][WITHOUT]['decode_rate']:.2f}[/]",
            f"{result['cpu_ratio']:.2f}",
            "–" if length is None else f"{length:.2f}",
            ", ".join(f"{s} {d['accepted']}/{d['verified']}" for s, d in result["drafts"].items()),
        )
    return shown
