"""Activations whose bits do not depend on where in a tensor a value stands.

torch computes most values of a tensor in vectors and what is left over by the scalar function of
the C library, whose last bit differs for tanh and the sigmoid. What is left over depends on the
size of the tensor and, beyond 16,384 values, on where threads cut it: so on what else is in the
batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.platform.ops.activation import Activation, activation, has_activation_kernel

_VECTORS = 64  # values of two vectors of bf16, the widest step of torch's loops
_CHUNK = 16_384  # a multiple of that; torch cuts what is longer among threads
_MODULES = frozenset({"transformers.activations", "torch.nn.modules.activation"})


def run_evenly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, value by value, over pieces that hold whole vectors only."""
    count = x.numel()
    flat = functional.pad(x.reshape(-1), (0, -count % _VECTORS))
    out = torch.empty_like(flat)
    for start in range(0, len(flat), _CHUNK):
        out[start : start + _CHUNK] = function(flat[start : start + _CHUNK])
    return out[:count].view(x.shape)


class RouterLogits(Tensor):
    """What a router's product gives: the sigmoid that some families take of it is even."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Everything else sees a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SIGMOIDS and isinstance(args[0], cls):
                return run_evenly(torch.sigmoid, args[0].as_subclass(Tensor))
            return func(*args, **(kwargs or {}))


_SIGMOIDS = (Tensor.sigmoid, torch.sigmoid, functional.sigmoid)


class EvenActivation(nn.Module):
    """An activation: by our kernel where it has it, else by `run_evenly`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.name = kernel_name(inner)

    def forward(self, x: Tensor) -> Tensor:
        """Values in, values out, in any shape."""
        if x.is_meta:
            return torch.empty_like(x)
        if self.name is not None and x.device.type == "cpu" and has_activation_kernel():
            return activation(x, self.name)
        return run_evenly(self.inner, x)


_KERNELS: dict[str, Activation] = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}


def kernel_name(module: nn.Module) -> Activation | None:
    """What `ops.activation` calls an activation of torch or transformers; None: not there."""
    if isinstance(module, nn.GELU):
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    return _KERNELS.get(type(module).__name__)


def replace_activations(part: nn.Module) -> None:
    """Make every activation of a tower or projector an `EvenActivation`."""
    for parent in list(part.modules()):
        if isinstance(parent, EvenActivation):
            continue
        for name, child in list(parent.named_children()):
            if is_activation(child):
                setattr(parent, name, EvenActivation(child))


def is_activation(module: nn.Module) -> bool:
    """Is it an activation of torch or transformers?"""
    return type(module).__module__ in _MODULES and not list(module.parameters())
