"""An executor with counters: what its parts took, and the bytes and operations that went into them.

The counters stay beside the computation: an executor that books its own parts (the native one) is
asked for them, another is one part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.executor import Executor

# Seconds, bytes read (weights, K and V), operations (two for a multiply-add); 0: not known.
Total = tuple[float, int, int]

FORWARD = "forward"  # of it, what no other part has: embedding, and what prepares a step
HEAD = "head"


class Metered:
    """What the engine asks of an executor in a step, counted."""

    def __init__(self, executor: Executor, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor: Any = executor  # some have more than the protocol asks for
        self._clock = clock
        self._forward_s = self._head_s = 0.0
        self._head_bytes = self._head_operations = 0
        self._newest: tuple[float, dict[str, Total]] | None = None

    def forward(self, batch: StepBatch, embeds: torch.Tensor | None = None) -> torch.Tensor:
        """See `Executor`."""
        began = self._clock()
        hidden: torch.Tensor = self._executor.forward(batch, embeds)
        self._forward_s += self._clock() - began
        return hidden

    def forward_tapped(
        self, batch: StepBatch, taps: tuple[int, ...], embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Executor`."""
        began = self._clock()
        found: tuple[torch.Tensor, torch.Tensor] = self._executor.forward_tapped(
            batch, taps, embeds
        )
        self._forward_s += self._clock() - began
        return found

    def logits(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """See `Executor`."""
        began = self._clock()
        logits: torch.Tensor = self._executor.logits(hidden, rows)
        self._count_head(began, logits.numel(), hidden.shape[-1])
        return logits

    def likeliest(self, hidden: torch.Tensor, rows: np.ndarray, num_tokens: int) -> list[int]:
        """See `Executor`."""
        began = self._clock()
        tokens: list[int] = self._executor.likeliest(hidden, rows, num_tokens)
        self._count_head(began, len(rows) * num_tokens, hidden.shape[-1])
        return tokens

    def _count_head(self, began: float, num_logits: int, width: int) -> None:
        self._head_s += self._clock() - began
        num_bytes = getattr(self._executor, "head_bytes", 0)
        self._head_bytes += num_bytes
        if num_bytes:
            self._head_operations += 2 * num_logits * width

    def phases(self, *, max_age_s: float = 0.0) -> dict[str, Total]:
        """Totals since the start, by part; those that never ran are left out.

        Asking the parts takes as long as a small layer does: whoever asks in every step lets the
        answer be `max_age_s` old.
        """
        now_s = self._clock()
        if self._newest is None or now_s - self._newest[0] >= max_age_s:
            self._newest = (now_s, self._total())
        return self._newest[1]

    def _total(self) -> dict[str, Total]:
        parts: dict[str, Total] = {}
        for one in self._counted():
            seconds, num_bytes, operations = parts.get(one.phase, (0.0, 0, 0))
            parts[one.phase] = (
                seconds + one.nanoseconds / 1e9,
                num_bytes + one.num_bytes,
                operations + one.operations,
            )
        if self._forward_s:
            known_s = sum(seconds for seconds, _, _ in parts.values())
            parts[FORWARD] = (max(0.0, self._forward_s - known_s), 0, 0)
        if self._head_s:
            parts[HEAD] = (self._head_s, self._head_bytes, self._head_operations)
        return parts

    def _counted(self) -> list[Any]:
        counters = getattr(self._executor, "phase_counts", None)
        return [] if counters is None else counters()
