"""Layer norm of rows, computed in fp32 and rounded once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from plait.platform.ops._native import has_kernels


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean) / √(variance + eps) · weight + bias, dense, of x's shape and dtype.

    Args:
        x: [..., D], fp32 or bf16.
        weight: [D], fp32 or bf16; None: ones.
        bias: Likewise; None: zeros.
        eps: Keeps a row of equal values finite.

    Raises:
        ValueError: Weight or bias do not fit x.
        RuntimeError: A dtype is neither fp32 nor bf16.
    """
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(f"layer_norm: x is {list(x.shape)}, the {name} {list(vector.shape)}")
    if x.device.type != "cpu" or not _use_kernel():
        return reference_layer_norm(x, weight, bias, eps)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out: Tensor = torch.ops.plait.layer_norm(rows, weight, bias, eps)
    return out.view(x.shape)


def reference_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`layer_norm` by torch.

    The kernel sums in another order: they differ by a few units in the last place of fp32 of the
    normed value, in bf16 by one unit at most.
    """
    wide = [None if vector is None else vector.float() for vector in (weight, bias)]
    return functional.layer_norm(x.float(), x.shape[-1:], wide[0], wide[1], eps).to(x.dtype)


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::layer_norm", _fake)
    return True


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    del weight, bias, eps
    return torch.empty_like(x)
