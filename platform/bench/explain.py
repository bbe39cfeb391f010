"""Where a batch's time goes: parts of prefill and decode, beside what the machine can do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.table import Column, Table

from plait.platform.metered import Total

ENGINE = "engine"  # what lies outside the executor: planning, sampling, text


class Explained(Protocol):
    """An engine whose steps can be followed: `EngineRunner`, or a test's fake."""

    def steps(
        self, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> Iterator[list[tuple[int, list[int]]]]:
        """(prompt's number, token ids) of each step."""

    def phases(self) -> dict[str, Total]:
        """Totals of the parts until now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Prefill or decode of one batch."""

    seconds: float
    processor_s: float  # of all threads; less than `seconds` where others had the cores too
    num_steps: int
    num_tokens: int
    phases: dict[str, Total]

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "seconds": self.seconds,
            "processor_s": self.processor_s,
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / self.seconds if self.seconds else None,
            "gb_per_s": sum(t[1] for t in self.phases.values()) / self.seconds / 1e9
            if self.seconds
            else None,
            "phases": {
                name: {"seconds": total[0], "bytes": total[1], "operations": total[2]}
                for name, total in self.phases.items()
            },
        }


def explain(
    engine: Explained, prompts: Sequence[Sequence[int]], output_tokens: int
) -> dict[str, Stage]:
    """Answer one batch. Steps up to that in which the last prompt ends are prefill."""
    waiting = set(range(len(prompts)))
    marks = [_Mark.now(engine, 0, 0)]
    num_steps = num_tokens = 0
    for tokens in engine.steps(prompts, output_tokens):
        num_steps += 1
        num_tokens += sum(len(ids) for _, ids in tokens)
        if waiting:
            waiting -= {index for index, ids in tokens if ids}
            if not waiting:
                marks.append(_Mark.now(engine, num_steps, num_tokens))
    marks.append(_Mark.now(engine, num_steps, num_tokens))
    prefill = _between(marks[0], marks[1], sum(map(len, prompts)))
    return {"prefill": prefill, "decode": _between(marks[1], marks[2], None)}


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment in a batch."""

    at_s: float
    processor_s: float
    phases: dict[str, Total]
    num_steps: int
    num_tokens: int

    @classmethod
    def now(cls, engine: Explained, num_steps: int, num_tokens: int) -> _Mark:
        now = (time.perf_counter(), time.process_time())
        return cls(*now, dict(engine.phases()), num_steps, num_tokens)


def _between(start: _Mark, end: _Mark, num_tokens: int | None) -> Stage:
    seconds = end.at_s - start.at_s
    phases: dict[str, Total] = {}
    for name, total in end.phases.items():
        before = start.phases.get(name, (0.0, 0, 0))
        spent = (total[0] - before[0], total[1] - before[1], total[2] - before[2])
        if any(spent):
            phases[name] = spent
    known_s = sum(total[0] for total in phases.values())
    phases[ENGINE] = (max(0.0, seconds - known_s), 0, 0)
    return Stage(
        seconds=seconds,
        processor_s=end.processor_s - start.processor_s,
        num_steps=end.num_steps - start.num_steps,
        num_tokens=end.num_tokens - start.num_tokens if num_tokens is None else num_tokens,
        phases=phases,
    )


def table(batch_size: int, stages: dict[str, Stage], probe: dict[str, Any]) -> Table:
    """Every part's time, and its rates as shares of what the probe reached."""
    read = probe["read_gb_per_s"]["best"]
    fastest = max((reach["best"] for reach in probe["gop_per_s"].values()), default=0.0)
    shown = Table(
        *(Column(title, no_wrap=True) for title in (f"batch {batch_size}", "part")),
        *(
            Column(title, justify="right", no_wrap=True)
            for title in ("ms a step", "share", "GB/s", "of it", "GOP/s")
        ),
        caption=f"the machine: {read:.1f} GB/s read, {fastest:.0f} GOP/s, by as many threads; "
        "of it: GB/s as a share of that",
    )
    for name, stage in stages.items():
        steps = max(1, stage.num_steps)
        whole = sum(total[1] for total in stage.phases.values())
        rate = f"{stage.num_tokens / stage.seconds:.0f} tok/s" if stage.seconds else ""
        row = _row(stage.seconds, whole, 0, steps, stage.seconds, read)
        shown.add_row(f"[bold]{name}[/]", rate, *row)
        ranked = sorted(stage.phases.items(), key=lambda item: -item[1][0])
        for part, (seconds, num_bytes, operations) in ranked:
            row = _row(seconds, num_bytes, operations, steps, stage.seconds, read)
            shown.add_row("", part, *row)
        shown.add_section()
    return shown


def _row(
    seconds: float, num_bytes: int, operations: int, steps: int, whole_s: float, read: float
) -> list[str]:
    gb_per_s = num_bytes / seconds / 1e9 if seconds else 0.0
    return [
        f"{seconds / steps * 1000:.3f}",
        f"{seconds / whole_s:.0%}" if whole_s else "",
        f"{gb_per_s:.1f}" if num_bytes else "",
        f"{gb_per_s / read:.0%}" if num_bytes and read else "",
        f"{operations / seconds / 1e9:.0f}" if operations and seconds else "",
    ]
