"""The likeliest token of each row of logits, or of hidden rows, for all rows in one call."""

from __future__ import annotations

import functools

import torch

from plait.platform.ops._native import has_kernels
from plait.platform.ops.linear import PackedWeight, linear
from plait.platform.ops.quantized_weight import PackedQuantized


def likeliest(logits_RV: torch.Tensor, num_tokens: int) -> list[int]:
    """Returns the first of the largest of each row's first `num_tokens` logits.

    -1 where one of these is NaN or the largest is not finite.

    Args:
        logits_RV: fp32 [R, V]; rows dense, they may lie apart.
        num_tokens: From 1 to V.

    Raises:
        RuntimeError: An argument does not fit; the message names it.
    """
    if logits_RV.device.type == "cpu" and _use_kernel():
        tokens: list[int] = torch.ops.plait.likeliest.default(logits_RV, num_tokens).tolist()
        return tokens
    return reference_likeliest(logits_RV, num_tokens)


def linear_likeliest(
    x_RK: torch.Tensor,
    packed: PackedWeight | PackedQuantized,
    bias: torch.Tensor | None,
    num_tokens: int,
) -> list[int]:
    """`likeliest` of what `linear` gives in fp32; for dense rows and quantised weights one call."""
    if not isinstance(packed, PackedQuantized) or not (
        x_RK.device.type == "cpu" and x_RK.is_contiguous() and _use_kernel()
    ):
        return likeliest(linear(x_RK, packed, bias, out_dtype=torch.float32), num_tokens)
    exact = packed.activations == "exact"
    tokens: list[int] = torch.ops.plait.quantized_likeliest.default(
        x_RK, packed.blob, *packed.form, exact, bias, num_tokens
    ).tolist()
    return tokens


def reference_likeliest(logits_RV: torch.Tensor, num_tokens: int) -> list[int]:
    """`likeliest` by torch. Exact: the same tokens, so there is no tolerance."""
    rows = logits_RV[:, :num_tokens]
    largest = rows.amax(1)  # NaN where a row has one
    tokens = (rows == largest[:, None]).to(torch.uint8).argmax(1)
    found: list[int] = torch.where(largest.isfinite(), tokens, -1).tolist()
    return found


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::likeliest", _fake)
    torch.library.register_fake("plait::quantized_likeliest", _fake_of_rows)
    return True


def _fake(logits: torch.Tensor, num_tokens: int) -> torch.Tensor:
    del num_tokens
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


def _fake_of_rows(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((x.shape[0],), dtype=torch.int64)
