"""Activations whose bits do not depend on where in a tensor a value stands.

torch computes most values of a tensor in vectors and what is left over by the scalar function of
the C library, whose last bit differs for tanh and the sigmoid. What is left over depends on the
size of the tensor and, beyond 16,384 values, on where threads cut it: so on what else is in the
batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_VECTORS = 64  # values of two vectors of bf16, the widest step of torch's loops
_CHUNK = 16_384  # a multiple of that; torch cuts what is longer among threads
_MODULES = frozenset({"transformers.activations", "torch.nn.modules.activation"})


class EvenActivation(nn.Module):
    """An activation, run over pieces that hold whole vectors only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Values in, values out, in any shape."""
        if x.is_meta:
            return torch.empty_like(x)
        count = x.numel()
        flat = functional.pad(x.reshape(-1), (0, -count % _VECTORS))
        out = torch.empty_like(flat)
        for start in range(0, len(flat), _CHUNK):
            out[start : start + _CHUNK] = self.inner(flat[start : start + _CHUNK])
        return out[:count].view(x.shape)


def replace_activations(part: nn.Module) -> None:
    """Make every activation of a tower or projector an `EvenActivation`."""
    for parent in list(part.modules()):
        if isinstance(parent, EvenActivation):
            continue
        for name, child in list(parent.named_children()):
            if type(child).__module__ in _MODULES and not list(child.parameters()):
                setattr(parent, name, EvenActivation(child))
