"""act(gate) · up, the middle of a gated MLP, on the output of its merged first layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from plait.platform.ops._native import has_kernels

Activation = Literal["silu", "gelu_tanh", "gelu"]

_REFERENCES: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
}


def gated_activation(x: Tensor, activation: Activation) -> Tensor:
    """Returns act(gate) · up, [..., I], computed in fp32 and rounded once.

    Args:
        x: [..., 2 I], the gates of a row and then its ups, fp32 or bf16; rows may lie apart.
        activation: silu, gelu_tanh (what transformers calls gelu_pytorch_tanh) or gelu.

    Raises:
        ValueError: There is no such activation, or the rows do not halve.
        RuntimeError: x is neither fp32 nor bf16.
    """
    if activation not in get_args(Activation):
        raise ValueError(f"gated_activation: no such activation as {activation}")
    if x.shape[-1] % 2:
        raise ValueError(f"gated_activation: rows of {x.shape[-1]} are not gates and ups")
    if x.device.type != "cpu" or not _use_kernel():
        return reference_gated_activation(x, activation)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out: Tensor = torch.ops.plait.gated_activation(rows, activation)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], x.shape[-1] // 2)


def reference_gated_activation(x: Tensor, activation: Activation) -> Tensor:
    """`gated_activation` by torch.

    The kernel's exponential errs by 2 units in the last place; its erf, for gelu, by 1.5e-7.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (_REFERENCES[activation](gate) * up).to(x.dtype)


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::gated_activation", _fake)
    return True


def _fake(x: Tensor, activation: str) -> Tensor:
    del activation
    return x.new_empty((x.shape[0], x.shape[1] // 2))
