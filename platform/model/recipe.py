"""What each weight is kept as: its numbers, or codes of the checkpoint's or our making."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from plait.platform.config import Options
from plait.platform.errors import ConfigError
from plait.platform.model.experts import is_experts, projections
from plait.platform.model.weight_format import INT4, INT8, WeightFormat
from plait.platform.model.weights import LoadPlan
from plait.platform.ops.quantized_weight import Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What every weight is kept as. Those that are not named keep their numbers."""

    formats: Mapping[str, WeightFormat] = field(default_factory=dict)  # by parameter
    as_stored: frozenset[str] = frozenset()  # those of them that the checkpoint has so
    activations: Activations = "exact"  # what quantised weights are multiplied with


def make_recipe(
    model: Any,
    language: nn.Module,
    plan: LoadPlan,
    options: Options,
    dtype: torch.dtype,
) -> Recipe:
    """Decide for every weight of a model whose leaves are transformers' own.

    `language` is the part without towers; `plan` tells what the checkpoint has. Raises
    `ConfigError` where the user asks for what would change nothing.
    """
    kept, wanted = _stored(model, plan.formats), {}
    if options.quantization == "none":
        kept = {}
    elif options.quantization != "auto":
        wanted = _made(model, language, kept, plan.tied, options)
    formats = {**kept, **wanted}
    formats |= {target: formats[name] for target, name in plan.tied.items() if name in formats}
    if not formats and options.quantized_activations != "auto":
        raise ConfigError(
            f"--quantized-activations {options.quantized_activations} does nothing: no weight is "
            "quantised. Leave it out, or quantise with --quantization int8 or int4",
            param="quantized_activations",
        )
    activations = options.quantized_activations
    if activations == "auto":
        activations = "exact" if dtype is torch.float32 else "int8"
    return Recipe(
        formats=formats,
        as_stored=frozenset(kept.keys() - wanted.keys()),
        activations=cast("Activations", activations),
    )


def _stored(model: Any, stored: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """What the checkpoint has and our layers can take; whatever else it has is expanded."""
    able = {f"{n}.weight" for n, m in model.named_modules() if type(m) is nn.Linear}
    able |= {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    able |= {name for name, module in _experts(model) if not module.is_transposed}
    return {name: stored[name] for name in sorted(able & stored.keys())}


def _made(
    model: Any,
    language: nn.Module,
    kept: Mapping[str, WeightFormat],
    tied: Mapping[str, str],
    options: Options,
) -> dict[str, WeightFormat]:
    """What we quantise: all that is wider than asked, but for routers, as their choices jump.

    Tables get 8 bits: 4 would harm them most.
    """
    asked = {"int8": INT8, "int4": INT4}[options.quantization]
    names = {module: name for name, module in model.named_modules()}
    tables = {model.get_input_embeddings(), model.get_output_embeddings()} & names.keys()
    places = {
        f"{names[m]}.weight": asked
        for parent in language.modules()
        if not any(is_experts(child) for child in parent.children())
        for m in parent.children()
        if type(m) in (nn.Linear, Conv1D)
    }
    inside = f"{names[language]}." if names[language] else ""
    places |= {name: asked for name, _ in _experts(model) if name.startswith(inside)}
    places |= {f"{names[table]}.weight": INT8 for table in tables}
    wider = {
        name: form
        for name, form in places.items()
        if name not in tied and (name not in kept or kept[name].bits > form.bits)
    }
    if not wider:
        found = ", ".join(sorted({form.name for form in kept.values()}))
        raise ConfigError(
            f"--quantization {options.quantization} does nothing: the weights are {found} already. "
            "Leave it out; --quantization none expands them",
            param="quantization",
        )
    return wider


def _experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if is_experts(module):
            for attribute in projections(module):
                yield f"{name}.{attribute}", module
