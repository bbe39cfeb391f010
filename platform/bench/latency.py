"""Latency of single requests in this process: first token, and the gaps between tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plait.platform.bench.stats import summary


class Steps(Protocol):
    """Answers one prompt and says when each token came."""

    def token_times(self, prompt: Sequence[int], output_tokens: int) -> list[float]:
        """Moments (perf_counter) of every output token, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One request's moments, seconds from its start."""

    times_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


def trace(steps: Steps, prompt: Sequence[int], output_tokens: int) -> Trace:
    """Run one request."""
    start_s = time.perf_counter()
    times = steps.token_times(prompt, output_tokens)
    return Trace(times_s=tuple(t - start_s for t in times))


def figures(traces: Sequence[Trace]) -> dict[str, Any]:
    """Percentiles over all requests, in milliseconds, and the median request's rate."""
    gaps = [gap for t in traces for gap in t.gaps_s]
    rates = [len(t.gaps_s) / sum(t.gaps_s) for t in traces if t.gaps_s]
    return {
        "requests": len(traces),
        "ttft_ms": summary([t.ttft_s for t in traces], scale=1000),
        "itl_ms": summary(gaps, scale=1000),
        "e2e_ms": summary([t.times_s[-1] for t in traces], scale=1000),
        "tokens_per_s": summary(rates),
    }


def measure(
    steps: Steps,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    warm_up: bool,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """One request after the other; the first prompt also warms up."""
    if warm_up:
        steps.token_times(prompts[0], min(8, output_tokens))
    traces = []
    for number, prompt in enumerate(prompts, 1):
        traces.append(trace(steps, prompt, output_tokens))
        gaps = traces[-1].gaps_s
        tell(
            f"request {number}/{len(prompts)}: TTFT {traces[-1].ttft_s * 1000:.1f} ms, "
            f"{sum(gaps) / len(gaps) * 1000:.1f} ms per token"
        )
    return figures(traces)
