"""Filling a skeleton: every weight is read, kept as its recipe says, and put where it belongs.

What a model keeps can also be taken out of it by name and put back (`kept_values`, `put_value`),
which is how packed weights survive a restart: see `packed_cache.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from plait.platform.errors import ModelUnsupported
from plait.platform.model.experts import PackedExperts, is_experts
from plait.platform.model.leaves import (
    Linear,
    LinearSlice,
    PackedTable,
    RMSNorm,
    Rows,
    RowWiseWeight,
    pack,
)
from plait.platform.model.packed_file import Kept
from plait.platform.model.tower import PatchEmbedding
from plait.platform.model.weight_format import WeightFormat, join
from plait.platform.model.weights import Sink, run_plan
from plait.platform.ops.linear import PackedWeight
from plait.platform.ops.quantized_weight import PackedQuantized, Quantized, quantize

if TYPE_CHECKING:
    from plait.platform.model.build import Skeleton

_VALUES_AT_ONCE = 1 << 24  # that are quantised


@torch.no_grad()
def read_weights(skeleton: Skeleton, advance: Callable[[], None]) -> None:
    """Read all weights from the checkpoint; `advance` is called once per step of the plan."""
    tables = tied_tables(skeleton)
    sinks: dict[str, Sink] = {
        name: _ignore if name in tables else _sink(skeleton, name, meta)
        for name, meta in skeleton.parameters.items()
    }
    as_stored = skeleton.recipe.as_stored
    run_plan(skeleton.plan, skeleton.model, sinks, skeleton.shapes, advance, as_stored)
    finish(skeleton)


def finish(skeleton: Skeleton) -> None:
    """Let tied embeddings read the head, and prove that nothing is left without a value."""
    model = skeleton.model
    for name, leaf in tied_tables(skeleton).items():
        module = model.get_submodule(name.rpartition(".")[0])
        _replace_parameter(module, "weight", PackedTable.of(leaf, skeleton.parameters[name]))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelUnsupported(f"{name} got no value from the checkpoint")


def tied_tables(skeleton: Skeleton) -> dict[str, Linear]:
    """Embeddings that are tied to a head: name of the embedding's weight → the head."""
    tables: dict[str, Linear] = {}
    for target, origin in skeleton.plan.tied.items():
        modules = {
            name: skeleton.model.get_submodule(name.rpartition(".")[0]) for name in (target, origin)
        }
        heads = [m for m in modules.values() if type(m) is Linear]
        embeddings = [n for n, m in modules.items() if isinstance(m, nn.Embedding)]
        if len(heads) == 1 and len(embeddings) == 1:
            tables[embeddings[0]] = heads[0]
    return tables


def _ignore(*_: object) -> None:
    """Sink of a tied embedding, whose rows are read from the head."""


def _sink(skeleton: Skeleton, name: str, meta: Tensor) -> Sink:
    """Where the tensor of that name goes, kept as the recipe says."""
    owner_name, _, attribute = name.rpartition(".")
    module = skeleton.model.get_submodule(owner_name)
    activations = skeleton.recipe.activations
    as_kept = _keeper(skeleton, name, meta.dtype)
    if attribute == "bias" and isinstance(module, LinearSlice | Linear | PatchEmbedding):
        return lambda bias: _set_bias(module, as_kept(bias))
    if isinstance(module, LinearSlice):
        owner, part = module.owner, module.part
        return lambda weight: owner.set_weight(part, as_kept(weight), activations)
    if isinstance(module, Linear):
        if owner_name in skeleton.leaves.transposed:
            return lambda weight: module.set_weight(as_kept(_turned(weight)), activations)
        return lambda weight: module.set_weight(as_kept(weight), activations)
    if is_experts(module) and meta.dim() == 3:
        turned = bool(module.is_transposed)
        return lambda weights: _put(
            module,
            attribute,
            PackedExperts.of(
                (as_kept(_turned(w) if turned else w) for w in _experts(weights)), activations
            ),
        )
    if name in skeleton.recipe.formats:
        return lambda weight: _put(module, attribute, pack(as_kept(weight), activations))
    return lambda tensor: _put(module, attribute, _copied(as_kept(tensor), tensor))


def _keeper(
    skeleton: Skeleton, name: str, dtype: torch.dtype
) -> Callable[[Tensor | Quantized], Any]:
    """What turns a weight as it was read into what is packed."""
    wanted = skeleton.recipe.formats.get(name)

    def keep(weight: Tensor | Quantized) -> Tensor | Quantized:
        if isinstance(weight, Quantized):
            return weight
        if wanted is None:
            return weight.to(dtype)
        try:
            return _quantized(weight, wanted)
        except ValueError as error:
            raise ModelUnsupported(f"{name} cannot be quantised: {error}") from error

    return keep


def _quantized(weight: Tensor, wanted: WeightFormat) -> Quantized:
    """Part by part: a table of a large vocabulary would else need several times its bytes."""
    num_inputs = weight.shape[1]
    parts = weight.split(max(1, _VALUES_AT_ONCE // num_inputs))
    return join([quantize(x, bits=wanted.bits, group=wanted.group or num_inputs) for x in parts])


def _turned(weight: Tensor | Quantized) -> Tensor:
    assert isinstance(weight, Tensor), "recipes leave transposed weights as numbers"
    return weight.t().contiguous()


def _experts(weights: Tensor | Quantized) -> Iterator[Tensor | Quantized]:
    if isinstance(weights, Tensor):
        yield from weights
        return
    for codes, scales, mins in zip(weights.codes, weights.scales, weights.mins, strict=True):
        yield Quantized(
            codes=codes, bits=weights.bits, group=weights.group, scales=scales, mins=mins
        )


def _copied(tensor: Tensor, read: object) -> Tensor:
    """Nothing of the checkpoint's files stays mapped."""
    return tensor.clone() if tensor is read else tensor


def _set_bias(module: Any, bias: Tensor) -> None:
    """Biases are cloned: like all that is kept, they must not be the file's own pages."""
    if isinstance(module, LinearSlice):
        module.owner.set_bias(module.part, bias)
    else:
        module.set_bias(bias.clone())


def _put(module: Any, attribute: str, value: Any) -> None:
    """Put a value, one of `Kept`, in a parameter's or buffer's place."""
    if isinstance(module, RMSNorm):
        module.weight = value
    elif isinstance(module, Linear):
        setattr(module, "packed" if attribute == "weight" else attribute, value)
    elif isinstance(module, PatchEmbedding):
        (module.set_weight if attribute == "weight" else module.set_bias)(value)
    elif isinstance(value, PackedWeight | PackedQuantized):
        _replace_parameter(
            module, attribute, PackedTable.of(Rows(value), getattr(module, attribute))
        )
    elif isinstance(value, PackedExperts):
        _replace_parameter(module, attribute, value)
    elif attribute in module._buffers:
        module._buffers[attribute] = value
    elif value.dim() == 2 and not isinstance(module, nn.Embedding) and "bias" not in attribute:
        _replace_parameter(module, attribute, value.as_subclass(RowWiseWeight))
    else:
        module._parameters[attribute] = nn.Parameter(value, requires_grad=False)


def _replace_parameter(module: nn.Module, attribute: str, value: object) -> None:
    """Put something that is not a parameter in a parameter's place."""
    module._parameters.pop(attribute, None)
    module.__dict__[attribute] = value


def kept_values(skeleton: Skeleton) -> Iterator[tuple[str, Kept]]:
    """All that a filled model keeps, each value once, by the name of a parameter."""
    tables = tied_tables(skeleton)
    for name in skeleton.parameters:
        if name in tables:
            continue
        owner_name, _, attribute = name.rpartition(".")
        module = skeleton.model.get_submodule(owner_name)
        if isinstance(module, LinearSlice):
            if module.part > 0:
                continue  # the first sibling's name stands for all
            module = module.owner.leaf
        elif isinstance(module, PatchEmbedding):
            (module,) = module._leaf
        value = module.packed if isinstance(module, Linear) and attribute == "weight" else None
        yield name, _value(getattr(module, attribute)) if value is None else value


def _value(value: Any) -> Kept:
    if isinstance(value, PackedTable):
        packed = value.owner.packed
        assert packed is not None
        return packed
    if isinstance(value, Tensor):
        return value.detach().as_subclass(Tensor)
    assert isinstance(value, PackedExperts)
    return value


def put_values(skeleton: Skeleton, values: Mapping[str, Kept]) -> None:
    """Put back what `kept_values` gave for an equal skeleton."""
    for name, value in values.items():
        owner_name, _, attribute = name.rpartition(".")
        module = skeleton.model.get_submodule(owner_name)
        if isinstance(module, LinearSlice):
            module = module.owner.leaf
        elif isinstance(module, PatchEmbedding):
            (module,) = module._leaf
        _put(module, attribute, value)
    finish(skeleton)
