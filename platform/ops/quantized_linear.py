"""Linear layers over quantised weights; `ops.linear` calls these.

With `activations="exact"` rows stay as they are, and the sum is the chain of `linear` over the
weight in fp32. With `activations="int8"` each row is rounded first, group by group of 32 inputs, to
whole numbers up to 127 times a scale; products of codes are then summed exactly, and one chain in
fp32 adds the groups in order. Either way a row's bits are the same alone and in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from plait.platform.ops.quantized_weight import ROW_GROUP, PackedQuantized


def reference_quantized_linear(
    x: Tensor, packed: PackedQuantized, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`quantized_linear` by torch's own product in fp32, [..., K] to [..., N]."""
    rows = x.float()
    if packed.activations == "int8":
        rows = round_rows(rows, row_group(packed))
    wide_bias = None if bias is None else bias.float()
    return functional.linear(rows, packed.unpack(), wide_bias).to(out_dtype)


def quantized_linear(
    rows: Tensor, packed: PackedQuantized, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Returns rows · weightᵀ + bias, [T, N]; rows [T, K] are fp32 or bf16."""
    out: Tensor = torch.ops.plait.quantized_linear.default(
        *_arguments(rows, packed, bias, out_dtype)
    )
    return out


def _arguments(
    rows: Tensor, packed: PackedQuantized, bias: Tensor | None, out_dtype: torch.dtype
) -> tuple[Any, ...]:
    return (
        rows,
        packed.blob,
        *packed.form,
        packed.activations == "exact",
        bias,
        out_dtype,
    )


def fake_quantized_linear(
    x: Tensor, blob: Tensor, in_features: int, out_features: int, *rest: Any
) -> Tensor:
    """What the kernel gives, without its values, for torch's tracing."""
    del blob, in_features
    return x.new_empty((x.shape[0], out_features), dtype=rest[-1])


def row_group(packed: PackedQuantized) -> int:
    """How many inputs of a row share a scale."""
    return min(packed.group or ROW_GROUP, ROW_GROUP)


def round_rows(rows: Tensor, group: int) -> Tensor:
    """Rows [..., K] in fp32 as their quantised form stands for them.

    A group's greatest size becomes 127; a group below 1e-30 becomes zeros; one that holds a value
    that is not finite becomes NaN.
    """
    in_features = rows.shape[-1]
    padded = functional.pad(rows, (0, -in_features % group)).unflatten(-1, (-1, group))
    sizes = padded.abs().amax(-1, keepdim=True)
    scales = sizes * (1 / 127)
    codes = (padded * (torch.tensor(127.0) / sizes)).round()
    values = torch.where(sizes > 1e-30, scales * codes, torch.zeros_like(codes))
    values = torch.where(sizes.isfinite(), values, torch.full_like(codes, torch.nan))
    return values.flatten(-2)[..., :in_features]
