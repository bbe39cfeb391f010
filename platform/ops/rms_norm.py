"""RMS norm of rows, with the three ways in which models apply its weight."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from plait.platform.ops._native import has_kernels


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_first: bool | None = None,
) -> Tensor:
    """Returns x / √(mean(x²) + eps) · (weight + weight_offset), computed in fp32.

    Models differ in what happens between: Llama and most others round the normed row to x's dtype
    before the weight (`round_first`), Gemma (with `weight_offset` 1) and OLMo 2 only round once.

    Args:
        x: [..., D], fp32 or bf16; rows and heads may lie apart.
        weight: [D], fp32 or bf16.
        eps: Keeps a row of zeros finite.
        weight_offset: Added to the weight in fp32.
        round_first: By default where there is no offset.

    Returns:
        Dense, of x's shape and dtype.

    Raises:
        ValueError: The weight does not fit x.
        RuntimeError: A dtype is neither fp32 nor bf16.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: x is {list(x.shape)}, the weight {list(weight.shape)}")
    if round_first is None:
        round_first = weight_offset == 0.0
    if x.device.type != "cpu" or not _use_kernel():
        return reference_rms_norm(
            x, weight, eps, weight_offset=weight_offset, round_first=round_first
        )
    rows = _as_rows(x)
    out: Tensor = torch.ops.plait.rms_norm(rows, weight, eps, weight_offset, round_first)
    return out if out.shape == x.shape else out.view(x.shape)


def reference_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, round_first: bool = True
) -> Tensor:
    """`rms_norm` by torch.

    The kernel sums squares in another order and takes one over a root where torch has a reciprocal
    root: they differ by a few units in the last place of fp32, in bf16 by one unit at most.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_first:
        normed = normed.to(x.dtype).float()
    return (normed * (weight.float() + weight_offset)).to(x.dtype)


def _as_rows(x: Tensor) -> Tensor:
    """Returns x as [T, D] or [T, H, D], without a copy where its layout allows it."""
    if x.dim() > 3:
        x = x.flatten(0, -3)
    elif x.dim() == 1:
        x = x.unsqueeze(0)
    return x if x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::rms_norm", _fake)
    return True


def _fake(x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_first: bool) -> Tensor:
    del weight, eps, weight_offset, round_first
    return x.new_empty(x.shape)
