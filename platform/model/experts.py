"""Mixtures of experts: our implementation of transformers' experts interface.

Tokens are sorted by expert, each expert's rows go through its packed weights, and each token sums
its experts' answers in the router's order, in fp32. So a row's bits depend on nothing but the row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plait.platform.errors import ModelUnsupported
from plait.platform.model.adapter_step import ExpertsStep
from plait.platform.model.leaves import Packed, pack
from plait.platform.model.mlp import activation_name
from plait.platform.ops.gated_activation import gated_activation
from plait.platform.ops.linear import linear
from plait.platform.ops.quantized_weight import Activations, Quantized

NAME = "plait"


def register() -> None:
    """Make `NAME` known to transformers' experts interface."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def is_experts(module: nn.Module) -> bool:
    """Is this a module that calls the experts interface?"""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed")


def projections(module: Any) -> tuple[str, str]:
    """Names of an experts module's two projections."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


class PackedExperts:
    """One projection of all experts of a layer."""

    def __init__(self, experts: tuple[Packed, ...]) -> None:
        self.experts = experts

    @classmethod
    def of(cls, weights: Iterable[Tensor | Quantized], activations: Activations) -> PackedExperts:
        """Pack the weights `[out, in]` of all experts, one by one."""
        return cls(tuple(pack(weight, activations) for weight in weights))


def check_experts(name: str, module: Any) -> None:
    """Refuse expert layers with parts that `experts_forward` does not compute."""
    if module.has_post_expert_norm:
        raise ModelUnsupported(f"{name} normalises each expert's answer, which is not served")


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Rows `[T, D]` through their experts `[T, k]`, weighted; the answer `[T, D]`."""
    if hidden_states.is_meta:
        return torch.empty_like(hidden_states)
    num_rows, top_k = top_k_index.shape
    up_name, down_name = projections(module)
    up: PackedExperts = getattr(module, up_name)
    down: PackedExperts = getattr(module, down_name)
    up_bias = getattr(module, f"{up_name}_bias") if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias else None

    order = top_k_index.reshape(-1).argsort(stable=True)  # slots, grouped by expert
    counts = torch.bincount(top_k_index.reshape(-1), minlength=len(up.experts)).tolist()
    row_of_slot = order // top_k
    rows = hidden_states[row_of_slot]
    answers = torch.empty((num_rows * top_k, hidden_states.shape[1]), dtype=hidden_states.dtype)
    activate = _activation(module)
    step: ExpertsStep | None = module.__dict__.get("adapters")
    adapters = None if step is None else step.run(num_rows, row_of_slot, counts)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        end = start + count
        x = rows[start:end]
        inner = linear(x, up.experts[expert], None if up_bias is None else up_bias[expert])
        if adapters is not None:
            adapters.change_up(inner, x, expert)
        inner = activate(inner)
        answer = linear(
            inner, down.experts[expert], None if down_bias is None else down_bias[expert]
        )
        if adapters is not None:
            adapters.change_down(answer, inner, expert)
        answers[order[start:end]] = answer
        start = end
    return _weighted_sum(answers.view(num_rows, top_k, -1), top_k_weights, hidden_states.dtype)


def _activation(module: Any) -> Callable[[Tensor], Tensor]:
    """What stands between an expert's projections; found once per module."""
    found: Callable[[Tensor], Tensor] | None = module.__dict__.get("plait_activation")
    if found is None:
        from transformers.integrations.moe import _default_apply_gate

        found = module._apply_gate if module.has_gate else module.act_fn
        if module.has_gate and type(module)._apply_gate is _default_apply_gate:
            name = activation_name(module.act_fn)
            found = found if name is None else functools.partial(gated_activation, activation=name)
        module.__dict__["plait_activation"] = found
    return found


def _weighted_sum(answers_TkD: Tensor, weights_Tk: Tensor, dtype: torch.dtype) -> Tensor:
    total = answers_TkD[:, 0].float() * weights_Tk[:, :1]
    for slot in range(1, answers_TkD.shape[1]):
        total += answers_TkD[:, slot].float() * weights_Tk[:, slot : slot + 1]
    return total.to(dtype)
