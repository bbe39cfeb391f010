"""Low-rank updates of linear layers: many adapters in one step, each on its own rows, in place.

A *leaf* is one linear layer as the model runs it, perhaps merged (q, k, v; gate, up) or an
embedding. What an adapter changes there are *parts*: ΔW = scale · b · a over a range of the leaf's
outputs. The a of all parts lie together, so that one pass over x serves q, k and v. An adapter is
packed once, without padding its ranks, and read from front to back; ``csrc/lora.h`` has the layout.

The work is that of the rows that have adapters, each at its own ranks. Rows without are not
touched. A row's numbers depend on that row and its adapters alone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from plait.platform.ops._native import has_kernels
from plait.platform.ops.lora_weights import (
    DTYPES,
    LoraPart,
    PlacedLora,
    example_lora,
    float_bits,
    lora_bytes,
    pack_lora,
)

__all__ = [
    "LoraPart",
    "LoraSegments",
    "PlacedLora",
    "exact_lora",
    "example_lora",
    "lora_",
    "lora_bytes",
    "lora_embedding_",
    "pack_lora",
    "reference_lora_",
    "reference_lora_embedding_",
]

_UNIT = 2.0**-24  # what rounding to fp32 changes at most, of a value
_CODE_UNIT = 0.51 / 32767  # the same of codes of 16 bits, of the greatest value


class LoraSegments:
    """Which rows of a step have which adapters. Built once a step, for all its leaves.

    Segments are (start, end, adapter, scale): rows start … end - 1 of the step. A row may be in
    several, whose changes are then applied in the order of the list. Adapters are kept alive.
    """

    __slots__ = ("_changed", "entries", "num_rows", "table")

    def __init__(self, segments: Iterable[tuple[int, int, PlacedLora, float]]) -> None:
        self.entries = tuple(segment for segment in segments if segment[0] != segment[1])
        if any(start < 0 or end < start for start, end, _, _ in self.entries):
            raise ValueError("lora: a segment must begin at 0 or later, and end after it begins")
        self.num_rows = max((end for _, end, _, _ in self.entries), default=0)
        self._changed = 0
        for _, _, placed, _ in self.entries:
            self._changed |= placed.changed
        rows = [
            _segment_fields(start, end, placed, scale)
            for start, end, (placed, scale) in _disjoint(self.entries)
        ]
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, 8)  # see csrc/lora.h

    def __bool__(self) -> bool:
        """Tells whether there are any."""
        return bool(self.entries)

    def changes(self, leaf: int) -> bool:
        """Tells whether any of the adapters changes the leaf."""
        return bool(self._changed >> leaf & 1)


def lora_(out: Tensor, x: Tensor, segments: LoraSegments, leaf: int) -> None:
    """Adds the segments' changes to a leaf's outputs, rounding once for each segment.

    Args:
        out: [T, N], fp32 or bf16, what the base computed; changed in place. Rows may lie apart.
        x: [T, K], fp32 or bf16, the leaf's input. Rows may lie apart.
        segments: Of this step.
        leaf: As in `pack_lora`.

    Raises:
        ValueError, RuntimeError: Rows, inputs or outputs do not fit.
    """
    if not segments.changes(leaf):
        return
    if out.device.type == "cpu" and _use_kernel():
        torch.ops.plait.lora_(out, x, segments.table, leaf)
    else:
        reference_lora_(out, x, segments, leaf)


def lora_embedding_(out: Tensor, token_ids: Tensor, segments: LoraSegments, leaf: int) -> None:
    """As `lora_` for an embedding: its input is the one-hot row of each token.

    Args:
        out: [T, H], fp32 or bf16; changed in place.
        token_ids: int64 [T]; those of rows in segments that change the leaf are ids of its
            vocabulary.
        segments: Of this step.
        leaf: As in `pack_lora`, with a [r, V].

    Raises:
        ValueError, RuntimeError: Rows, ids or outputs do not fit.
    """
    if not segments.changes(leaf):
        return
    if out.device.type == "cpu" and _use_kernel():
        torch.ops.plait.lora_embedding_(out, token_ids, segments.table, leaf)
    else:
        reference_lora_embedding_(out, token_ids, segments, leaf)


def reference_lora_(out: Tensor, x: Tensor, segments: LoraSegments, leaf: int) -> None:
    """`lora_` by torch's own products in fp32: right, but slow, and not the same in every batch."""
    _check_rows(out, x, segments)
    for start, end, placed, scale in segments.entries:
        rows = x[start:end].float()
        parts = placed.unpack(leaf)
        _check_parts(parts, out, x.shape[1])
        _apply(out[start:end], [rows @ part.a.float().T for part in parts], parts, scale)


def reference_lora_embedding_(
    out: Tensor, token_ids: Tensor, segments: LoraSegments, leaf: int
) -> None:
    """`lora_embedding_` by torch's own gather and products in fp32."""
    _check_rows(out, token_ids, segments)
    for start, end, placed, scale in segments.entries:
        parts = placed.unpack(leaf)
        _check_parts(parts, out, None)
        ids = token_ids[start:end]
        for part in parts:
            if bool(((ids < 0) | (ids >= part.a.shape[1])).any()):
                raise ValueError(f"lora: a token is not one of the {part.a.shape[1]}")
        _apply(out[start:end], [part.a.T[ids].float() for part in parts], parts, scale)


def _apply(
    out: Tensor, shrunk: Sequence[Tensor], parts: Sequence[LoraPart], request_scale: float
) -> None:
    for t, part in zip(shrunk, parts, strict=True):
        change = t @ part.b.float().T
        if part.b_bias is not None:
            change += part.b_bias
        change *= request_scale * part.scale
        y = out[:, part.start : part.start + part.out_features]
        if part.g is None:
            y.copy_(y.float() + change)
        else:
            bias = 0.0 if part.bias is None else part.bias
            y.copy_(part.g * (y.float() - bias + change) + bias)


def exact_lora(out: Tensor, x: Tensor, segments: LoraSegments, leaf: int) -> tuple[Tensor, Tensor]:
    """Returns what `lora_` makes of `out` in fp64, and how far from it each value may lie.

    A chain of n additions in fp32 errs by at most n · 2⁻²⁴ of the sum of its terms' sizes: t has
    four chains of K / 4 and two additions of their sums, b · t one of r, over values of t that err
    already. Scaling and adding round a few times more, and each segment rounds to out's dtype.
    With int8 weights each value of x, and of t, errs by half a unit of 2⁻¹⁵ of its row's greatest.
    """
    exact, bound = out.double(), torch.zeros_like(out, dtype=torch.float64)
    half_unit = 2.0**-8 if out.dtype is torch.bfloat16 else _UNIT
    for start, end, placed, scale in segments.entries:
        rows = x[start:end].double()
        for part in placed.unpack(leaf):
            columns = slice(part.start, part.start + part.out_features)
            y, y_error = exact[start:end, columns], bound[start:end, columns]
            change, error = _exact_change(rows, part, scale * part.scale)
            bias = torch.zeros(1) if part.bias is None else part.bias
            g = torch.ones(1) if part.g is None else part.g
            bias, g = bias.double(), g.double()
            error += y_error + 3 * _UNIT * (y.abs() + bias.abs() + change.abs())
            scaled = g * (y - bias + change)
            y.copy_(scaled + bias)
            error = g.abs() * error + 2 * _UNIT * (scaled.abs() + bias.abs())
            y_error.copy_(error + half_unit * (y.abs() + error) + 2.0**-126)
    return exact, bound


def _exact_change(rows: Tensor, part: LoraPart, scale: float) -> tuple[Tensor, Tensor]:
    a, b = part.a.double(), part.b.double()
    t, sizes = rows @ a.T, rows.abs() @ a.abs().T
    t_error = (a.shape[1] / 4 + 4) * _UNIT * sizes
    if part.a.dtype is torch.float64:
        t_error += rows.abs().amax(dim=1, keepdim=True) * _CODE_UNIT * a.abs().sum(dim=1)
    change, sizes = t @ b.T, t.abs() @ b.abs().T
    if part.a.dtype is torch.float64:  # b has the scales here, of which kernels put some into t
        terms = (t.abs() + t_error) * b.abs().amax(dim=0)
        spread = (b.abs() / b.abs().amax(dim=0).clamp(min=1e-300)).sum(dim=1)
        coding = terms.amax(dim=1, keepdim=True) * _CODE_UNIT * spread
    else:
        coding = torch.zeros(())
    error = t_error @ b.abs().T + (part.rank + 2) * _UNIT * (sizes + t_error @ b.abs().T) + coding
    if part.b_bias is not None:
        change += part.b_bias
        error += 2 * _UNIT * (change.abs() + part.b_bias.abs())
    return change * scale, error * abs(scale) + 4 * _UNIT * (change * scale).abs()


def _check_rows(out: Tensor, x: Tensor, segments: LoraSegments) -> None:
    if x.shape[0] != out.shape[0]:
        raise ValueError(f"lora: out has {out.shape[0]} rows, the input {x.shape[0]}")
    if segments.num_rows > out.shape[0]:
        raise ValueError(f"lora: out has {out.shape[0]} rows, segments {segments.num_rows}")


def _check_parts(parts: Sequence[LoraPart], out: Tensor, inputs: int | None) -> None:
    for part in parts:
        if inputs is not None and part.a.shape[1] != inputs:
            raise ValueError(f"lora: x has {inputs} columns, the adapter takes {part.a.shape[1]}")
        if part.start + part.out_features > out.shape[1]:
            raise ValueError(
                f"lora: outputs {part.start} to {part.start + part.out_features} are not inside "
                f"the leaf's {out.shape[1]}"
            )


def _disjoint(
    entries: Sequence[tuple[int, int, PlacedLora, float]],
) -> list[tuple[int, int, tuple[PlacedLora, float]]]:
    """Cuts segments so that any two are the same rows or share none, in the order of rows."""
    in_order = all(a[1] <= b[0] for a, b in itertools.pairwise(entries))
    if in_order:
        return [(start, end, (placed, scale)) for start, end, placed, scale in entries]
    cuts = sorted({cut for start, end, _, _ in entries for cut in (start, end)})
    return [
        (low, high, (placed, scale))
        for low, high in itertools.pairwise(cuts)
        for start, end, placed, scale in entries
        if start <= low and high <= end
    ]


def _segment_fields(start: int, end: int, placed: PlacedLora, scale: float) -> list[int]:
    weights, table = placed.buffer.data_ptr(), placed.table.data_ptr()
    size = placed.table.numel()
    dtype = DTYPES[placed.dtype]
    return [start, end, weights, table, placed.num_leaves, size, dtype, float_bits(scale)]


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels() or not hasattr(torch.ops.plait, "lora_"):
        return False
    torch.library.register_fake("plait::lora_", _fake)
    torch.library.register_fake("plait::lora_embedding_", _fake)
    return True


def _fake(out: Tensor, x: Tensor, segments: Tensor, leaf: int) -> None:
    """Changes nothing but `out`, and returns nothing."""
