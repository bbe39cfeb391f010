"""Perplexity of a text under an executor, in chunks, so that few logits exist at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from support.step_driver import StepDriver, Track

from plait.platform.batch import StepBatch


class _Scorer(StepDriver):
    """Adds up what each next token was worth."""

    total = 0.0

    def _take(
        self, tracks: Sequence[Track], counts: Sequence[int], batch: StepBatch, hidden: torch.Tensor
    ) -> None:
        (track,), (count,) = tracks, counts
        rows = min(count, len(track.tokens) - 1 - track.num_computed)
        logits = self.executor.logits(hidden, np.arange(rows))
        start = track.num_computed + 1
        targets = torch.tensor(track.tokens[start : start + rows])
        self.total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        track.num_computed += count
        if track.num_computed == len(track.tokens):
            track.output.append(0)


def perplexity(executor, token_ids: Sequence[int], kv_dtype: str | None = None) -> float:
    """Exp of the mean loss of every token but the first."""
    driver = _Scorer(executor, num_blocks=len(token_ids) // 4 + 8, kv_dtype=kv_dtype)
    driver.run([Track(list(token_ids), num_output=1)], chunk=256)
    return math.exp(driver.total / (len(token_ids) - 1))
