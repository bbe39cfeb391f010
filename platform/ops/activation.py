"""An activation of every value by itself, whose bits do not depend on where the value stands.

torch computes most values of a tensor in vectors and what is left over by the scalar function of
the C library, whose last bit differs for tanh and the sigmoid: so a value's bits depend on what
else is in the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from plait.platform.ops._native import has_kernels

Activation = Literal["silu", "gelu_tanh", "gelu", "quick_gelu"]

_REFERENCES: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def has_activation_kernel() -> bool:
    """Whether `activation` runs the kernel on a CPU, else torch, whose last bits vary."""
    return _use_kernel()


def activation(x: Tensor, name: Activation) -> Tensor:
    """Returns the activation of x, [...], computed in fp32 and rounded once. x is fp32 or bf16.

    Args:
        x: Any shape.
        name: silu, gelu_tanh (what transformers calls gelu_pytorch_tanh), gelu or quick_gelu.

    Raises:
        ValueError: There is no such activation.
        RuntimeError: x is neither fp32 nor bf16.
    """
    if name not in get_args(Activation):
        raise ValueError(f"activation: no such activation as {name}")
    if x.device.type != "cpu" or not _use_kernel():
        return reference_activation(x, name)
    out: Tensor = torch.ops.plait.activation(x.contiguous(), name)
    return out


def reference_activation(x: Tensor, name: Activation) -> Tensor:
    """`activation` by torch.

    The kernel's exponential errs by 2 units in the last place; its erf, for gelu, by 1.5e-7.
    """
    return _REFERENCES[name](x.float()).to(x.dtype)


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::activation", _fake)
    return True


def _fake(x: Tensor, name: str) -> Tensor:
    del name
    return torch.empty_like(x)
