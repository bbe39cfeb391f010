"""Gated MLPs as three operations: one product, one activation, one product.

A module is taken for `down(act(gate(x)) · up(x))` only if its own forward, run with stand-ins for
its linears, computes exactly that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from plait.platform.model.leaves import Linear, LinearSlice
from plait.platform.ops.gated_activation import (
    Activation,
    gated_activation,
    reference_gated_activation,
)

_SEPARATE = ("gate_proj", "up_proj", "down_proj")
_FUSED = ("gate_up_proj", "down_proj")


class GatedMLP(nn.Module):
    """Stands where a family's gated MLP stood; its linears keep their names."""

    def __init__(self, mlp: nn.Module, gate_up: Linear, activation: Activation) -> None:
        super().__init__()
        for name, child in mlp.named_children():
            if name in (*_SEPARATE, *_FUSED):
                self.add_module(name, child)
        self._gate_up = (gate_up,)  # in a tuple: it may already be a child under its own name
        self.activation: Activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Rows in, rows out."""
        inner = self._gate_up[0](x)
        if inner.is_meta:
            inner = inner[..., : inner.shape[-1] // 2]
        else:
            inner = gated_activation(inner, self.activation)
        out: Tensor = self.down_proj(inner)  # type: ignore[operator]
        return out


def replace_mlps(model: nn.Module) -> int:
    """Replace every gated MLP of `model`, whose linears are ours already; returns how many."""
    known: dict[tuple[Any, ...], Activation | None] = {}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            gate_up = _gate_up_of(child)
            if gate_up is None:
                continue
            key = (type(child), type(getattr(child, "act_fn", None)))
            if key not in known:
                known[key] = _activation_of(child)
            activation = known[key]
            if activation is not None:
                setattr(parent, name, GatedMLP(child, gate_up, activation))
                count += 1
    return count


def _gate_up_of(mlp: nn.Module) -> Linear | None:
    """The one linear that gives gates and ups, if the module has nothing but an MLP's parts."""
    children = dict(mlp.named_children())
    linears = {name for name, child in children.items() if isinstance(child, Linear | LinearSlice)}
    activations = {n for n in set(children) - linears if not list(children[n].parameters())}
    own = list(mlp.parameters(recurse=False)) + list(mlp.buffers(recurse=False))
    if linears | activations != set(children) or own:
        return None
    if linears == set(_FUSED) and isinstance(children["gate_up_proj"], Linear):
        return children["gate_up_proj"]
    gate, up = children.get("gate_proj"), children.get("up_proj")
    if linears != set(_SEPARATE) or not isinstance(gate, LinearSlice):
        return None
    merged = isinstance(up, LinearSlice) and up.owner is gate.owner and len(gate.owner.rows) == 2
    return gate.owner.leaf if merged and gate.part == 0 else None


class _StandIn(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def _gate(x: Tensor) -> Tensor:
    return 2 * x


def _up(x: Tensor) -> Tensor:
    return x + 0.5


def _down(x: Tensor) -> Tensor:
    return 3 * x


def _gate_up(x: Tensor) -> Tensor:
    return torch.cat([_gate(x), _up(x)], dim=-1)


@torch.no_grad()
def _activation_of(mlp: nn.Module) -> Activation | None:
    """Run the module's forward over stand-ins; which activation makes it ours, if any does?"""
    stand_ins = {"gate_proj": _gate, "up_proj": _up, "down_proj": _down, "gate_up_proj": _gate_up}
    trial = copy.copy(mlp)
    trial.__dict__["_modules"] = {
        name: _StandIn(stand_ins[name]) if name in stand_ins else child
        for name, child in mlp._modules.items()
    }
    x = torch.linspace(-4, 4, 48).view(1, 6, 8)
    try:
        wanted = trial(x)
    except Exception:  # noqa: BLE001 - a forward that needs more than rows is not this shape
        return None
    for activation in get_args(Activation):
        ours = _down(reference_gated_activation(_gate_up(x), activation))
        if isinstance(wanted, Tensor) and torch.allclose(ours, wanted, rtol=1e-6, atol=1e-6):
            found: Activation = activation
            return found
    return None


@torch.no_grad()
def activation_name(act_fn: Callable[[Tensor], Tensor]) -> Activation | None:
    """The name under which `ops.gated_activation` has this function."""
    x = torch.linspace(-8, 8, 101)
    for activation in get_args(Activation):
        gated = reference_gated_activation(torch.cat([x, torch.ones_like(x)]), activation)
        if torch.allclose(act_fn(x), gated, rtol=1e-6, atol=1e-6):
            found: Activation = activation
            return found
    return None
