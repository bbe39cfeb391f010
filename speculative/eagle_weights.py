"""The weights of an EAGLE-3 head: checked by name and shape, then packed for our ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plait.platform.errors import ModelUnsupported
from plait.platform.model.tensor_files import SafetensorsFiles
from plait.platform.ops.linear import PackedWeight, pack_linear
from plait.platform.ops.quantized_weight import (
    Activations,
    PackedQuantized,
    pack_quantized,
    quantize,
)
from plait.speculative.eagle_config import HeadConfig

Shape = tuple[int, ...]
Packed = PackedWeight | PackedQuantized
LogitRows = Callable[[Tensor | None], Tensor]  # the target's, of some tokens or of all

_LAYER = "layers.0."
_INT4_GROUP = 32  # inputs to a scale
# Of the target, or what the others say again.
_IGNORED = frozenset({"t2d", "verifier_norm.weight", "verifier_lm_head.weight"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What matrices are kept as: numbers of the target's dtype, or codes of 8 or 4 bits."""

    bits: int | None = None
    activations: Activations = "exact"  # what codes are multiplied with

    def pack(self, weight: Tensor) -> Packed:
        """A matrix as kernels read it."""
        if self.bits is None:
            return pack_linear(weight)
        group = _INT4_GROUP if self.bits == 4 else weight.shape[1]
        return pack_quantized(
            quantize(weight, bits=self.bits, group=group), activations=self.activations
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadWeights:
    """All weights; projections of one input are one."""

    input_norm: Tensor | None  # before fc
    fc: Packed
    embed_norm: Tensor
    hidden_norm: Tensor
    qkv: Packed
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Packed
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Packed
    down: Packed
    norm: Tensor
    lm_head: Packed
    embed: Tensor | None  # None: the target's table
    target_ids: Tensor | None  # int64 [draft_vocab_size]; None: the target's own ids

    @property
    def num_bytes(self) -> int:
        """What they take in memory."""
        fields = [getattr(self, name) for name in self.__dataclass_fields__]
        return sum(
            x.nbytes if isinstance(x, Tensor) else x.num_bytes for x in fields if x is not None
        )


def load_weights(
    directory: Path, config: HeadConfig, dtype: torch.dtype, kept: Kept, logit_rows: LogitRows
) -> HeadWeights:
    """Read and pack a head. Raises `ModelUnsupported` naming what does not fit.

    `logit_rows` is asked for a head that has none of its own, `lm_head.weight`.
    """
    files = SafetensorsFiles(directory)
    names = _match(files.shapes, config)

    def read(name: str) -> Tensor:
        return files.read(names[name]).to(dtype, copy=True)

    def maybe(name: str) -> Tensor | None:
        return read(name) if name in names else None

    def packed(*parts: str) -> Packed:
        return kept.pack(torch.cat([read(part) for part in parts]))

    attention, mlp = f"{_LAYER}self_attn.", f"{_LAYER}mlp."
    projections = [f"{attention}{part}_proj" for part in "qkv"]
    biases = [read(f"{part}.bias") for part in projections] if config.has_bias else []
    ids = _target_ids(files.read(names["d2t"]), config) if "d2t" in names else None
    has_rows = "lm_head.weight" in names
    return HeadWeights(
        input_norm=maybe("input_norm.weight"),
        fc=packed("fc.weight"),
        embed_norm=read(f"{_LAYER}input_layernorm.weight"),
        hidden_norm=read(f"{_LAYER}hidden_norm.weight"),
        qkv=packed(*(f"{part}.weight" for part in projections)),
        qkv_bias=torch.cat(biases) if biases else None,
        q_norm=maybe(f"{attention}q_norm.weight"),
        k_norm=maybe(f"{attention}k_norm.weight"),
        o=packed(f"{attention}o_proj.weight"),
        o_bias=maybe(f"{attention}o_proj.bias"),
        mlp_norm=read(f"{_LAYER}post_attention_layernorm.weight"),
        gate_up=packed(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        down=packed(f"{mlp}down_proj.weight"),
        norm=read("norm.weight"),
        lm_head=packed("lm_head.weight") if has_rows else kept.pack(logit_rows(ids)),
        embed=maybe("embed_tokens.weight"),
        target_ids=ids,
    )


def _expected(config: HeadConfig) -> dict[str, Shape]:
    """Shapes of what every head of this config has."""
    hidden, wide = config.hidden_size, 2 * config.hidden_size
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, config.num_taps * config.target_hidden_size),
        "norm.weight": (hidden,),
        f"{_LAYER}self_attn.o_proj.weight": (hidden, config.num_heads * config.head_size),
        f"{_LAYER}mlp.gate_proj.weight": (config.intermediate_size, hidden),
        f"{_LAYER}mlp.up_proj.weight": (config.intermediate_size, hidden),
        f"{_LAYER}mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{_LAYER}{norm}.weight"] = (hidden,)
    for part, count in heads.items():
        shapes[f"{_LAYER}self_attn.{part}_proj.weight"] = (count * config.head_size, wide)
        if config.has_bias:
            shapes[f"{_LAYER}self_attn.{part}_proj.bias"] = (count * config.head_size,)
    if config.has_bias:
        shapes[f"{_LAYER}self_attn.o_proj.bias"] = (hidden,)
    if config.has_qk_norm:
        shapes |= {f"{_LAYER}self_attn.{x}_norm.weight": (config.head_size,) for x in "qk"}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.num_taps * config.target_hidden_size,)
    if config.draft_vocab_size != config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def _match(found: Mapping[str, Shape], config: HeadConfig) -> dict[str, str]:
    """Our name of each tensor → the checkpoint's."""
    names = {_plain(name): name for name in found}
    names = {name: given for name, given in names.items() if name not in _IGNORED}
    needed = _expected(config)
    optional = {  # without them it uses the target's
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        "d2t": (config.draft_vocab_size,),
    }
    known = {**optional, **needed}
    missing, unknown = sorted(needed.keys() - names.keys()), sorted(names.keys() - known.keys())
    if missing:
        shown = [f"{name} {list(needed[name])}" for name in missing]
        raise _unfit(config, f"lacks {_some(shown)}")
    if unknown:
        raise _unfit(config, f"has tensors that an EAGLE-3 head has no place for: {_some(unknown)}")
    for name, given in names.items():
        if tuple(found[given]) != known[name]:
            raise _unfit(
                config,
                f"has {given} of shape {list(found[given])}, where its config asks for "
                f"{list(known[name])}",
            )
    return names


def _plain(name: str) -> str:
    """Names differ by prefix between tools; the only layer is midlayer or layers.0."""
    name = name.removeprefix("model.")
    return _LAYER + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _target_ids(offsets: Tensor, config: HeadConfig) -> Tensor:
    """The target's id of each of the head's; the checkpoint has differences."""
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if (
        int(ids.min()) < 0
        or int(ids.max()) >= config.vocab_size
        or len(set(ids.tolist())) < len(ids)
    ):
        raise _unfit(
            config, f"has a d2t that does not lead to {len(ids)} of {config.vocab_size} tokens"
        )
    return ids


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _unfit(config: HeadConfig, what: str) -> ModelUnsupported:
    return ModelUnsupported(f"the draft head {config.name} {what}", param="draft_model")
