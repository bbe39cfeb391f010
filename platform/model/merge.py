"""Replacing leaves: linears become ours, siblings of one input are merged, norms become ours.

What may be merged is found by structure (sibling names, equal input width, equal bias) and then
proved by the probe: siblings that it sees called with different inputs are separated again.
Siblings whose weights have different formats (llama.cpp gives v more bits than q and k) stay apart:
one format for all would be the widest, and its bytes are read at every step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from plait.platform.model.leaves import (
    LayerNorm,
    Leaves,
    Linear,
    LinearSlice,
    MergedLinear,
    RMSNorm,
    Site,
)
from plait.platform.model.mlp import replace_mlps
from plait.platform.ops.rms_norm import reference_rms_norm

SIBLINGS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


def replace_leaves(model: nn.Module, formats: Mapping[str, object] | None = None) -> Leaves:
    """Put our leaves into `model`, which lies on the meta device.

    `formats` tells how weights are kept, by parameter, where not as numbers.
    """
    leaves = Leaves()
    norms: dict[tuple[Any, ...], NormForm | None] = {}
    for parent_name, parent in list(model.named_modules()):
        _merge_siblings(parent_name, parent, leaves, formats or {})
        for name, child in list(parent.named_children()):
            full_name = f"{parent_name}.{name}" if parent_name else name
            if type(child) in (nn.Linear, Conv1D):
                setattr(parent, name, _plain_leaf(full_name, child, leaves))
            elif type(child) is nn.LayerNorm and len(child.normalized_shape) == 1:
                child.__class__ = LayerNorm  # its parameters stay where they are
            elif type(child).__name__.endswith("RMSNorm"):
                norm = _norm_leaf(child, norms)
                if norm is not None:
                    setattr(parent, name, norm)
                    leaves.num_norms += 1
    leaves.num_mlps = replace_mlps(model)
    return leaves


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear of torch's or of GPT-2's kind."""
    if isinstance(linear, Conv1D):
        return int(linear.weight.shape[0]), int(linear.weight.shape[1])
    assert isinstance(linear, nn.Linear)
    return linear.in_features, linear.out_features


def _plain_leaf(name: str, linear: nn.Linear | Conv1D, leaves: Leaves) -> Linear:
    in_features, out_features = _shape(linear)
    has_bias, dtype = linear.bias is not None, linear.weight.dtype
    leaf = Linear(in_features, out_features, has_bias=has_bias, dtype=dtype)
    leaves.sites[name] = Site(leaf=leaf, start=0, end=out_features)
    if isinstance(linear, Conv1D):
        leaves.transposed.add(name)
    return leaf


def _merge_siblings(
    parent_name: str, parent: nn.Module, leaves: Leaves, formats: Mapping[str, object]
) -> None:
    for names in SIBLINGS:
        children = [getattr(parent, name, None) for name in names]
        linears = {n: x for n, x in zip(names, children, strict=True) if type(x) is nn.Linear}
        if len(linears) != len(names):
            continue
        if len({(x.in_features, x.bias is None) for x in linears.values()}) != 1:
            continue
        prefix = f"{parent_name}." if parent_name else ""
        by_format: dict[object, list[str]] = {}
        for name in names:
            by_format.setdefault(formats.get(f"{prefix}{name}.weight"), []).append(name)
        for alike in by_format.values():
            if len(alike) > 1:
                _merge(prefix, parent, {name: linears[name] for name in alike}, leaves)


def _merge(
    prefix: str, parent: nn.Module, linears: Mapping[str, nn.Linear], leaves: Leaves
) -> None:
    sizes = tuple(x.out_features for x in linears.values())
    first = next(iter(linears.values()))
    has_bias, dtype = first.bias is not None, first.weight.dtype
    leaf = Linear(first.in_features, sum(sizes), has_bias=has_bias, dtype=dtype)
    full_names = tuple(f"{prefix}{name}" for name in linears)
    owner = MergedLinear(full_names, sizes, leaf)
    leaves.merged.append(owner)
    for part, name in enumerate(linears):
        setattr(parent, name, LinearSlice(owner, part))
        start, end = owner.rows[part]
        leaves.sites[full_names[part]] = Site(leaf=leaf, start=start, end=end)


def separate(model: nn.Module, owner: MergedLinear, leaves: Leaves) -> None:
    """Undo one merge, before weights are loaded: its parts became plain leaves."""
    leaves.merged.remove(owner)
    for part, name in enumerate(owner.names):
        start, end = owner.rows[part]
        whole = owner.leaf
        leaf = Linear(
            whole.in_features, end - start, has_bias=whole.has_bias, dtype=whole.weight.dtype
        )
        leaf.rows_probed = whole.rows_probed
        leaves.sites[name] = Site(leaf=leaf, start=0, end=end - start)
        parent_name, _, child_name = name.rpartition(".")
        setattr(model.get_submodule(parent_name), child_name, leaf)


@dataclass(frozen=True, slots=True)
class NormForm:
    """Which of the forms of `ops.rms_norm` a norm computes."""

    weight_offset: float
    round_first: bool


def _norm_leaf(norm: nn.Module, known: dict[tuple[Any, ...], NormForm | None]) -> RMSNorm | None:
    """Our norm in the place of `norm`, if it computes the same; None where it does not."""
    weight = getattr(norm, "weight", None)
    eps = eps_of(norm)
    others = [n for n, _ in (*norm.named_parameters(), *norm.named_buffers()) if n != "weight"]
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or eps is None or others:
        return None
    key = (type(norm), tuple(weight.shape), eps)
    if key not in known:
        known[key] = _norm_form(norm, eps)
    form = known[key]
    if form is None:
        return None
    return RMSNorm(weight, eps, weight_offset=form.weight_offset, round_first=form.round_first)


def eps_of(norm: nn.Module) -> float | None:
    """What a norm adds to the variance."""
    for name in ("variance_epsilon", "eps", "epsilon", "norm_eps"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    return None


@torch.no_grad()
def _norm_form(norm: nn.Module, eps: float) -> NormForm | None:
    """Find by trial, on small and large rows, which of our forms `norm` computes, if any."""
    trial = copy.deepcopy(norm).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    weight = trial.weight
    assert isinstance(weight, Tensor)
    size = weight.shape[0]
    weight.copy_(torch.randn(size, generator=generator))
    scale = torch.tensor([1e-3, 1.0, 30.0])[:, None]  # the first row is ruled by eps
    rows = torch.randn(3, size, generator=generator) * scale
    wanted = trial(rows)
    for offset in (0.0, 1.0):
        ours = reference_rms_norm(rows, weight, eps, weight_offset=offset)
        if torch.allclose(ours, wanted, rtol=1e-5, atol=1e-6):
            return NormForm(offset, _rounds_first(trial, rows, eps, offset))
    return None


def _rounds_first(trial: nn.Module, rows: Tensor, eps: float, offset: float) -> bool:
    """Does the norm round to its input's dtype before the weight? Only visible in bf16."""
    trial = trial.to(torch.bfloat16)
    rows = rows.to(torch.bfloat16)
    weight = trial.weight
    assert isinstance(weight, Tensor)
    wanted = trial(rows)
    differing = {
        first: int(
            reference_rms_norm(rows, weight, eps, weight_offset=offset, round_first=first)
            .ne(wanted)
            .sum()
        )
        for first in (True, False)
    }
    return differing[True] <= differing[False]
