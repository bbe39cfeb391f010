"""Before a program serves: it and the family's own modules over the same rows, side by side.

Spans of several lengths at several places of their sequences, K and V before them at random, and of
families that take images some rows of these. What the layers pass on is compared too, so that the
first layer that differs can be named, and what was written to the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from plait.platform.batch import StepBatch
from plait.platform.config import CacheConfig, VisionInfo
from plait.platform.model.executor import TorchExecutor
from plait.platform.model.native.trace import NotLowered

_BLOCK_SIZE = 16
_SPANS = ((0, 5), (19, 4), (33, 1))  # (computed before, rows)
# What rows may differ by, as a share of their length. In fp32 sums are taken in the same order but
# for layer norms and some activations; in bf16 one rounding the other way is 2⁻⁹ of a value, and
# passes through all layers behind it.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}


class Tapped(Protocol):
    """What is proved: `NativeExecutor`."""

    def forward_tapped(
        self, batch: StepBatch, taps: tuple[int, ...], embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `executor.Executor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far the two were apart."""

    worst: float  # share of a row's length
    is_exact: bool  # every bit was the same


def prove(executor: TorchExecutor, native: Tapped) -> Agreement:
    """Run both; they share weights and pages.

    Raises `NotLowered` where they differ by more than rounding, with the first layer that does.
    """
    context = executor.num_positions
    spans = [(start, count) for start, count in _SPANS if start + count <= context]
    pages = _allocate(executor, spans)
    batch, embeds = _batch(executor, spans)
    taps = tuple(range(executor.num_layers + 1))
    before = [group.clone() for group in pages]
    wanted = executor.forward_tapped(batch, taps, embeds)
    written = [group.clone() for group in pages]
    for group, values in zip(pages, before, strict=True):
        group.copy_(values)
    got = native.forward_tapped(batch, taps, embeds)
    width, tolerance = executor.hidden_size, _TOLERANCE[wanted[0].dtype]
    worst = 0.0
    for tap in taps:
        columns = slice(tap * width, (tap + 1) * width)
        place = f"layer {tap - 1}" if tap else "the embedded rows"
        worst = max(worst, _apart(got[1][:, columns], wanted[1][:, columns], tolerance, place))
    worst = max(worst, _apart(got[0], wanted[0], tolerance, "the final norm"))
    pairs = [(got[0], wanted[0]), *zip(pages, written, strict=True)]
    return Agreement(worst=worst, is_exact=all(torch.equal(a, b) for a, b in pairs))


def _apart(got: Tensor, wanted: Tensor, tolerance: float, place: str) -> float:
    """How far rows are apart; a tenth of them may be further, as a share of their length.

    A router chooses another expert where two of them are nearly as good.
    """
    got, wanted = got.float(), wanted.float()
    off = (got - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)
    most = float(off.nan_to_num(nan=torch.inf).sort().values[-1 - len(off) // 10])
    if most > tolerance:
        raise NotLowered(
            f"{place}: the program's rows differ from the family's own by {most:.2g} of their "
            f"length, where rounding explains {tolerance:g}"
        )
    return most


def _allocate(executor: TorchExecutor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Small pages with K and V at random."""
    num_blocks = 1 + sum(_num_blocks(start + count) for start, count in spans)
    groups = tuple(replace(g, num_blocks=num_blocks) for g in executor.kv_groups)
    executor.allocate(
        CacheConfig(
            block_size=_BLOCK_SIZE,
            groups=groups,
            dtype=executor.kv_dtype,
            enable_prefix_caching=False,
        )
    )
    generator = torch.Generator().manual_seed(0)
    for pages in executor.pages:
        pages.normal_(generator=generator)
    return executor.pages


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)


def _batch(
    executor: TorchExecutor, spans: Sequence[tuple[int, int]]
) -> tuple[StepBatch, Tensor | None]:
    """Rows of random tokens, the second span's of an image where the model takes any."""
    model, random = executor.model, np.random.default_rng(0)
    counts = np.array([count for _, count in spans])
    starts = np.concatenate([[0], counts.cumsum()])
    positions = np.concatenate([np.arange(a, a + n) for a, n in spans])
    table = np.zeros((len(spans), max(_num_blocks(a + n) for a, n in spans)), np.int32)
    used = 1
    for row, (start, count) in zip(table, spans, strict=True):
        needed = _num_blocks(start + count)
        row[:needed] = np.arange(used, used + needed)
        used += needed
    of_row = np.repeat(np.arange(len(spans)), counts)
    slots = table[of_row, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    batch = StepBatch(
        token_ids=random.integers(0, model.vocab_size, len(positions)),
        positions=positions,
        query_start=starts.astype(np.int32),
        seq_lens=np.array([start + count for start, count in spans], np.int32),
        slot_mapping=(slots.astype(np.int64),) * len(executor.kv_groups),
        block_tables=(table,) * len(executor.kv_groups),
        sample_rows=np.zeros(0, np.int64),
        sample_start=np.zeros(len(spans) + 1, np.int32),
        image_rows=np.zeros(0, np.int64),
    )
    return (batch, None) if model.vision is None else _with_image(batch, model.vision)


def _with_image(batch: StepBatch, vision: VisionInfo) -> tuple[StepBatch, Tensor]:
    start, stop = batch.query_start[1:3].tolist()
    rows = np.arange(start, stop)
    shape = (len(rows), vision.num_levels * vision.hidden_size)
    embeds = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    positions = batch.positions
    if vision.has_grid_positions:
        positions = np.stack([positions] * 3)
        positions[1, rows] += rows % 2
        positions[2, rows] += 2 * (rows % 3)
    ranges = batch.ranges
    if vision.bidirectional:
        end = int(batch.seq_lens[1])
        ranges = np.array([[1, end - len(rows), end]], np.int32)
    return replace(batch, image_rows=rows, positions=positions, ranges=ranges), embeds
