"""Rotary embeddings whose frequencies would depend on the batch are fixed at load.

Two rope types of transformers choose frequencies by the longest position of a forward. In a mixed
batch a request's answer would then depend on its neighbours, so the choice is made once: `longrope`
by the longest context that is served (as vLLM does), `dynamic` by staying within the length up to
which it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from plait.platform.errors import ModelUnsupported

_CHANGING = frozenset({"longrope", "dynamic"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFacts:
    """The context that a config's rope reaches, and what was fixed about it."""

    context_length: int
    notes: tuple[str, ...] = ()


def rope_facts(config: Any, max_model_len: int | None) -> RopeFacts:
    """The model's own context limit, with rope scaling counted in."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise ModelUnsupported("the config names no max_position_embeddings")
    rope = _parameters(config)
    kinds = {p.get("rope_type", "default") for p in rope}
    notes: list[str] = []
    if "dynamic" in kinds:
        notes.append(
            f"dynamic rope scaling stays within {longest} tokens, where it is the identity"
        )
    for p in rope:
        original = p.get("original_max_position_embeddings")
        if p.get("rope_type") == "yarn" and original and p.get("factor"):
            longest = max(longest, int(original * p["factor"]))
        if p.get("rope_type") == "longrope":
            served = max_model_len or longest
            kind = "long" if served > _original(config, p) else "short"
            notes.append(
                f"longrope uses its {kind} factors for every request "
                f"(chosen by max_model_len {served})"
            )
    return RopeFacts(context_length=longest, notes=tuple(dict.fromkeys(notes)))


def fix_frequencies(model: nn.Module, config: Any, max_model_len: int) -> None:
    """Fix batch-dependent frequencies of every rotary module, once its buffers are filled."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            parameters = config.rope_parameters
            if max_model_len > _original(config, parameters):
                length = _original(config, parameters) + 1
                frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=length)
                module.inv_freq.copy_(frequencies)  # type: ignore[operator]
            module.rope_type = "longrope_fixed"  # type: ignore[assignment]
        elif kind == "dynamic":
            module.rope_type = "ntk_fixed"  # type: ignore[assignment]


@contextmanager
def held_frequencies(model: nn.Module) -> Iterator[None]:
    """Within, no rotary module looks for the longest position: meta tensors have no values.

    Raises `ModelUnsupported` where `fix_frequencies` could not fix them.
    """
    kinds = {m: getattr(m, "rope_type", None) for m in model.modules()}
    held = {m: kind for m, kind in kinds.items() if isinstance(kind, str) and kind in _CHANGING}
    for kind in kinds.values():
        if isinstance(kind, dict) and _CHANGING & set(kind.values()):
            raise ModelUnsupported(f"rope types {kind} that change with length are not served")
    try:
        for module in held:
            module.rope_type = "held"  # type: ignore[assignment]
        yield
    finally:
        for module, kind in held.items():
            module.rope_type = kind  # type: ignore[assignment]


def divide_frequencies(model: nn.Module, factors: Tensor) -> None:
    """Apply the rope factors that Llama 3 GGUF files carry."""
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, Tensor):
            if frequencies.shape != factors.shape:
                raise ModelUnsupported(
                    f"the GGUF file has {factors.numel()} rope factors for "
                    f"{frequencies.numel()} frequencies"
                )
            with torch.no_grad():
                frequencies.div_(factors.to(frequencies.dtype))


def _parameters(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    if "rope_type" in rope or "rope_theta" in rope:
        return [rope]
    return [p for p in rope.values() if isinstance(p, dict)]


def _original(config: Any, parameters: dict[str, Any]) -> int:
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(original or config.max_position_embeddings)
