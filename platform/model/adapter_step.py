"""What adapters change in the current step, as the leaves see it.

One object of each kind below belongs to an executor and is shared by all the leaves it concerns,
as attention's `StepContext` is. `segments` is None in a step without adapters: a leaf then looks at
nothing else, so that base rows take the same path as if adapters did not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from plait.platform.errors import InternalError
from plait.platform.ops.linear import PackedWeight, linear
from plait.platform.ops.lora import LoraSegments, PlacedLora, lora_, lora_embedding_


class LeafStep(Protocol):
    """What a linear leaf asks."""

    segments: LoraSegments | None

    def change(self, out: Tensor, x: Tensor, leaf: int) -> Tensor:
        """The leaf's outputs, changed; `out` may be written to. Asked where `segments` is set."""


class LayerStep:
    """The step of every leaf that takes the step's rows as they are."""

    def __init__(self) -> None:
        self.segments: LoraSegments | None = None
        self.num_rows = 0

    def change(self, out: Tensor, x: Tensor, leaf: int) -> Tensor:
        """Add the low-rank changes in place."""
        segments = self.segments
        if segments is not None and segments.changes(leaf):
            rows = out.view(-1, out.shape[-1])
            _check_rows(rows, self.num_rows)
            lora_(rows, x.reshape(-1, x.shape[-1]), segments, leaf)
        return out


NO_ADAPTERS = LayerStep()  # of a leaf that belongs to no executor yet; never set


def _check_rows(rows: Tensor, num_rows: int) -> None:
    """Other rows than the step's would get other requests' adapters."""
    if rows.shape[0] != num_rows:
        raise InternalError(f"a layer with adapters took {rows.shape[0]} of {num_rows} rows")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadRows:
    """Rows of a head that stand in the place of the base's, or that the adapter adds."""

    token_ids: Tensor  # int64 [n], ascending
    packed: PackedWeight  # [n, H]
    bias: Tensor | None = None  # [n]

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.token_ids.nbytes + self.packed.num_bytes + bias

    def write(self, out: Tensor, x: Tensor) -> None:
        """Put their logits for rows `x` into `out` `[R, V]`."""
        values = linear(x, self.packed, self.bias, out_dtype=out.dtype)
        out.index_copy_(1, self.token_ids, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingRows:
    """Rows of an embedding that stand in the place of the base's, or that the adapter adds."""

    token_ids: Tensor  # int64 [n], ascending
    rows: Tensor  # [n, H], scaled as the family's embedding scales its own

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return self.token_ids.nbytes + self.rows.nbytes

    def find(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where each of `token_ids` stands among ours, and whether it does."""
        at = torch.searchsorted(self.token_ids, token_ids).clamp_(max=len(self.token_ids) - 1)
        return at, self.token_ids[at] == token_ids

    def write(self, out: Tensor, token_ids: Tensor) -> None:
        """Put them into `out` `[T, H]` where its tokens are ours."""
        at, is_ours = self.find(token_ids)
        out[is_ours] = self.rows[at[is_ours]]


class HeadStep:
    """The head's step: its rows are those that logits are wanted for."""

    def __init__(self) -> None:
        self.segments: LoraSegments | None = None
        self.replaced: Sequence[tuple[int, int, HeadRows]] = ()
        self.num_rows = 0
        self.width = 0  # of the widest row's logits

    def change(self, out: Tensor, x: Tensor, leaf: int) -> Tensor:
        """Widen the logits, put replaced rows' in, then add the low-rank changes."""
        segments = self.segments
        assert segments is not None
        if self.width > out.shape[-1]:
            out = nn.functional.pad(out, (0, self.width - out.shape[-1]))
        rows, x = out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1])
        _check_rows(rows, self.num_rows)
        for start, end, replaced in self.replaced:
            replaced.write(rows[start:end], x[start:end])
        lora_(rows, x, segments, leaf)
        return out


class EmbeddingStep:
    """The embedding's step; runs as a forward hook, after the family's own embedding."""

    def __init__(self, leaf: int) -> None:
        self.segments: LoraSegments | None = None
        self.replaced: Sequence[tuple[int, int, EmbeddingRows]] = ()
        self.token_ids = torch.empty(0, dtype=torch.int64)
        self.leaf = leaf

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Put replaced rows in, then add the low-rank changes, in place."""
        del module, args
        segments = self.segments
        if segments is None or not (self.replaced or segments.changes(self.leaf)):
            return None
        rows = output.view(-1, output.shape[-1])
        _check_rows(rows, len(self.token_ids))
        for start, end, replaced in self.replaced:
            replaced.write(rows[start:end], self.token_ids[start:end])
        lora_embedding_(rows, self.token_ids, segments, self.leaf)
        return output


class ExpertsStep:
    """One experts module's step: its rows are sorted by expert, and each expert has leaves."""

    def __init__(self, step: LayerStep, up_leaf: int, down_leaf: int, num_experts: int) -> None:
        self.step = step
        self.up_leaf = up_leaf
        self.down_leaf = down_leaf
        self._experts = np.arange(num_experts)
        ours = (1 << num_experts) - 1
        self._leaves = ours << up_leaf | ours << down_leaf

    def run(self, num_rows: int, row_of_slot: Tensor, counts: Sequence[int]) -> ExpertsRun | None:
        """What to change among the slots; None where no adapter of the step changes any expert.

        Slots are sorted by expert (`counts` of each) and then by row, so that a segment of the
        step is a range of each expert's slots.
        """
        if self.step.segments is None:
            return None
        entries = [e for e in self.step.segments.entries if e[2].changed & self._leaves]
        if not entries:
            return None
        if num_rows != self.step.num_rows:
            raise InternalError(f"experts took {num_rows} of {self.step.num_rows} rows")
        keys = np.repeat(self._experts, counts) * num_rows + row_of_slot.numpy()
        borders = np.array([entry[:2] for entry in entries])
        firsts = np.cumsum([0, *counts[:-1]])
        sought = self._experts[:, None, None] * num_rows + borders
        found = np.searchsorted(keys, sought) - firsts[:, None, None]
        return ExpertsRun(self, [_cut(entries, ranges) for ranges in found.tolist()])


def _cut(
    entries: Sequence[tuple[int, int, PlacedLora, float]], ranges: Sequence[tuple[int, int]]
) -> LoraSegments:
    """The same adapters over other rows."""
    return LoraSegments(
        (start, end, placed, scale)
        for (start, end), (_, _, placed, scale) in zip(ranges, entries, strict=True)
    )


@dataclass(frozen=True, slots=True)
class ExpertsRun:
    """The segments of each expert of one run, over that expert's slots."""

    step: ExpertsStep
    segments: Sequence[LoraSegments]

    def change_up(self, out: Tensor, x: Tensor, expert: int) -> None:
        """Change the outputs of the expert's first projection, in place."""
        lora_(out, x, self.segments[expert], self.step.up_leaf + expert)

    def change_down(self, out: Tensor, x: Tensor, expert: int) -> None:
        """Change the outputs of the expert's last projection, in place."""
        lora_(out, x, self.segments[expert], self.step.down_leaf + expert)
