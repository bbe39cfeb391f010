"""Building a model: the transformers class on the meta device, with our leaves, then its weights.

`build_skeleton` reads no weights; it is all that `check_model` needs. `filling.py` reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plait.platform.config import KVGroup, Options
from plait.platform.errors import ModelUnsupported
from plait.platform.model import attention, experts, tower
from plait.platform.model.elementwise import replace_activations
from plait.platform.model.experts import check_experts, is_experts
from plait.platform.model.gguf import GgufFile
from plait.platform.model.head import backbone_name, make_head
from plait.platform.model.leaves import Leaves
from plait.platform.model.merge import replace_leaves, separate
from plait.platform.model.parts import Head, Parts
from plait.platform.model.places import Places
from plait.platform.model.probe import LayerAttention, probe_attention
from plait.platform.model.quantized_files import open_quantized
from plait.platform.model.recipe import Recipe, make_recipe
from plait.platform.model.rope import divide_frequencies, fix_frequencies
from plait.platform.model.sites import find_places
from plait.platform.model.source import Checkpoint
from plait.platform.model.tensor_files import SafetensorsFiles, Shape, TensorSource
from plait.platform.model.tower import replace_patch_embeddings
from plait.platform.model.vision import VisionParts, find_parts
from plait.platform.model.weights import LoadPlan, plan_load

_DEFAULTS = Options()


@dataclass(slots=True, kw_only=True)
class Skeleton:
    """A model without weights whose every layer is known to be servable, and how to fill it."""

    model: Any  # the family's ForCausalLM
    head: Head
    leaves: Leaves
    layers: tuple[LayerAttention, ...]
    source: TensorSource
    plan: LoadPlan
    recipe: Recipe  # what weights are kept as
    parameters: Mapping[str, Tensor]  # meta tensors of everything a checkpoint may hold
    vocab_size: int  # width of the logits
    places: Places  # what adapters can change
    vision: VisionParts | None  # where the model takes images

    @property
    def backbone(self) -> Any:
        """The part that turns tokens into hidden rows."""
        if self.vision is not None:
            return self.vision.language
        return getattr(self.model, backbone_name(self.model))

    @property
    def parts(self) -> Parts:
        """What an executor runs."""
        vision = self.vision
        return Parts(
            leaves=self.leaves,
            backbone=self.backbone,
            head=self.head,
            output=self.model.get_output_embeddings(),
            dtype=self.model.config.dtype,
            hidden_size=self.model.config.get_text_config().hidden_size,
            layers=self.layers,
            places=self.places,
            family=None if vision is None else vision.family,
            open_vision=None if vision is None else lambda _: vision,
        )

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of everything a checkpoint may hold."""
        return {name: tuple(t.shape) for name, t in self.parameters.items()}

    def num_parameters(self) -> int:
        """Weights of the model, tied ones once."""
        return sum(t.numel() for name, t in self.parameters.items() if name not in self.plan.tied)

    def bytes_by_format(self) -> dict[str, int]:
        """Bytes of the weights in memory, tied ones once, by what they are kept as."""
        counts: dict[str, int] = {}
        for name, tensor in self.parameters.items():
            if name in self.plan.tied:
                continue
            form = self.recipe.formats.get(name)
            kind = str(tensor.dtype).removeprefix("torch.") if form is None else form.name
            size = tensor.nbytes if form is None else form.num_bytes(self._oriented(name))
            counts[kind] = counts.get(kind, 0) + size
        return counts

    def _oriented(self, name: str) -> Shape:
        """Shape of a weight as `[..., outputs, inputs]`."""
        owner_name = name.rpartition(".")[0]
        *leading, rows, columns = self.parameters[name].shape
        module: Any = self.model.get_submodule(owner_name)
        is_turned = owner_name in self.leaves.transposed or (
            is_experts(module) and bool(module.is_transposed)
        )
        return (*leading, columns, rows) if is_turned else (*leading, rows, columns)


def build_skeleton(
    checkpoint: Checkpoint, dtype: torch.dtype, options: Options = _DEFAULTS
) -> Skeleton:
    """Build `checkpoint`'s class on the meta device, replace its leaves and probe it.

    Raises `ModelUnsupported` with the reason where the model cannot be served, or where its
    checkpoint does not hold what its class needs; `ConfigError` where `options` ask for weights
    in a way that changes nothing.
    """
    attention.register()
    experts.register()
    tower.register()
    model = _instantiate(checkpoint, dtype)
    parameters = _parameters(model, dtype)
    source, plan = _open_source(checkpoint, model, options)
    place = backbone_name(model)
    vision = find_parts(model, place, checkpoint.vision) if checkpoint.vision else None
    for name, module in model.named_modules():
        if is_experts(module):
            check_experts(name, module)
    language = getattr(model, place) if vision is None else vision.language
    recipe = make_recipe(model, language, plan, options, dtype)
    leaves = replace_leaves(model, recipe.formats)
    if vision is None:
        layers = probe_attention(model, getattr(model, place))
    else:
        tower.rename(vision.tower)
        for part in vision.encoding:
            replace_patch_embeddings(part)
            replace_activations(part)
        layers = probe_attention(vision.language, vision.language)
    for owner in [o for o in leaves.merged if o.num_repeats or not o.drained]:
        separate(model, owner, leaves)
    leaves.release()
    _announce(leaves, recipe)
    head, vocab_size = make_head(model)
    return Skeleton(
        model=model,
        head=head,
        leaves=leaves,
        layers=layers,
        source=source,
        plan=plan,
        recipe=recipe,
        parameters=parameters,
        vocab_size=vocab_size,
        places=find_places(model, leaves, layers, plan.tied, *([vision.part_of] if vision else [])),
        vision=vision,
    )


def _announce(leaves: Leaves, recipe: Recipe) -> None:
    """Tell leaves as what their weights will come."""
    for name, site in leaves.sites.items():
        form, leaf = recipe.formats.get(f"{name}.weight"), site.leaf
        if form is not None:
            sizes = leaf.out_features, leaf.in_features
            leaf.unfilled = form.unfilled(*sizes, activations=recipe.activations)


def _instantiate(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    config = copy.deepcopy(checkpoint.config)
    config._attn_implementation = attention.NAME
    config._experts_implementation = experts.NAME
    parts = [config]
    if checkpoint.vision is not None:
        config.vision_config._attn_implementation = tower.BUILD_NAME
        parts += [config.get_text_config(), config.vision_config]
    for part in parts:
        part.dtype = dtype
        for flag in ("output_router_logits", "output_attentions", "output_hidden_states"):
            if getattr(part, flag, False):
                setattr(part, flag, False)
    contexts = checkpoint.model_class.get_init_context(dtype, False, False, None)
    with _all(contexts):
        try:
            model = checkpoint.model_class(config)
        except Exception as error:
            if isinstance(error, KeyError) and error.args == (attention.NAME,):
                raise ModelUnsupported(
                    f"{checkpoint.model_class.__name__} is not served: it chooses among attentions "
                    "of its own, not through transformers' attention interface"
                ) from error
            raise ModelUnsupported(
                f"{checkpoint.model_class.__name__} cannot be built from its config: "
                f"{type(error).__name__}: {error}"
            ) from error
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # it would look for padding in every step's tokens
            module.__dict__["warn_if_padding_and_no_attention_mask"] = _ignore
    return model.eval()


def _all(contexts: list[Any]) -> Any:
    from transformers.utils.generic import ContextManagers

    return ContextManagers(contexts)


def _parameters(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters and persistent buffers as meta tensors, in the dtype each will be kept in."""
    in_fp32 = tuple(model._get_dtype_plan(dtype))
    return {
        name: t.float() if any(part in name for part in in_fp32) and t.is_floating_point() else t
        for name, t in model.state_dict().items()
    }


def _open_source(
    checkpoint: Checkpoint, model: Any, options: Options
) -> tuple[TensorSource, LoadPlan]:
    if checkpoint.is_gguf:
        file = GgufFile(checkpoint.path, model)
        return file, plan_load(model, file, convert=False)
    files = SafetensorsFiles(checkpoint.path)
    if checkpoint.quantization is None:
        return files, plan_load(model, files, convert=True)
    quantized = open_quantized(files, checkpoint.quantization)
    if quantized.why_not and options.quantization == "auto":
        raise ModelUnsupported(quantized.why_not)
    return quantized, plan_load(model, quantized, convert=True)


def kv_groups(skeleton: Skeleton, max_model_len: int) -> tuple[KVGroup, ...]:
    """Layers by what their KV looks like; a window no request can outgrow is none."""
    groups: dict[tuple[int | None, int, int], list[int]] = {}
    for layer in skeleton.layers:
        window = layer.window if layer.window and layer.window < max_model_len else None
        groups.setdefault((window, layer.num_kv_heads, layer.key_size), []).append(layer.layer)
    return tuple(
        KVGroup(layers=tuple(layers), window=window, num_kv_heads=heads, head_size=size)
        for (window, heads, size), layers in groups.items()
    )


def prepare(skeleton: Skeleton, *, max_model_len: int) -> None:
    """Give the model everything that no checkpoint holds: frequencies, scales, masks."""
    model = skeleton.model
    _fill_buffers(model)
    fix_frequencies(model, skeleton.backbone.config, max_model_len)
    if isinstance(skeleton.source, GgufFile) and skeleton.source.rope_factors is not None:
        divide_frequencies(model, skeleton.source.rope_factors)


def _ignore(*_: object) -> None:
    """Stands for a warning that would read every step's tokens."""


def _fill_buffers(model: Any) -> None:
    """Give non-persistent buffers (rope frequencies, scales) their values, by the family's init."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent = model.get_submodule(name.rpartition(".")[0])
        parent._buffers[name.rpartition(".")[2]] = torch.empty_like(buffer, device="cpu")
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # what transformers' init leaves alone
    model.initialize_weights()
