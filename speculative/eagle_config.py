"""What the config of an EAGLE-3 head says, in either of its forms.

original     architectures ["LlamaForCausalLMEagle3"], the layer's fields beside draft_vocab_size;
             what training tools differ in lies under eagle_config
speculators  speculators_model_type "eagle3", the layer's fields under transformer_layer_config
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.platform.errors import ModelUnsupported
from plait.platform.ops.gated_activation import Activation
from plait.speculative.rotary import ROPES, Rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_LAYERS = ("llama", "qwen3")  # whose decoder layer is served
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
# What a config means that does not say it, in transformers' classes of these layers.
_CONTEXTS = {"llama": 2048, "qwen3": 32768}
_EPS, _THETA, _QWEN3_HEAD_SIZE = 1e-6, 10_000.0, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One head: its decoder layer, and what it takes from the target."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    eps: float
    activation: Activation
    has_bias: bool  # on the attention's projections
    has_qk_norm: bool
    vocab_size: int  # of the target
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...] | None  # see `Executor.forward_tapped`; None: the usual three
    norm_before_residual: bool
    norm_before_fc: bool
    rope: Rope

    @property
    def num_taps(self) -> int:
        """Rows of the target beside each other at the head's entrance."""
        return 3 if self.taps is None else len(self.taps)

    def taps_of(self, num_layers: int) -> tuple[int, ...]:
        """Where to tap a target of so many layers: low, middle and high, if nothing is said."""
        taps = (2, num_layers // 2, num_layers - 3) if self.taps is None else self.taps
        if not all(0 <= tap <= num_layers for tap in taps):
            raise _unsupported(
                self.name,
                f"takes hidden states after {_listed(taps)} layers, and the model has {num_layers}",
            )
        return taps


def is_head(directory: Path) -> bool:
    """Whether a directory holds a head that drafts from another model's hidden states."""
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and (
        "speculators_model_type" in raw
        or "eagle_config" in raw
        or "draft_vocab_size" in raw
        or any("eagle" in name.lower() for name in _architectures(raw))
    )


def _architectures(raw: Mapping[str, Any]) -> list[str]:
    named = raw.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def read_head_config(directory: Path) -> HeadConfig:
    """Read a head's config.json. Raises `ModelUnsupported` with what is not served."""
    name = directory.resolve().name
    try:
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unsupported(name, f"has no readable config.json: {error}") from error
    kind = raw.get("speculators_model_type")
    try:
        if kind is None and any("eagle3" in name.lower() for name in _architectures(raw)):
            return _config(name, raw, raw)
        if kind == "eagle3" and isinstance(raw.get("transformer_layer_config"), dict):
            return _config(name, raw, raw["transformer_layer_config"])
    except (AttributeError, TypeError) as error:  # a list where an object should be, and the like
        raise _unsupported(name, f"has a config that is not valid: {error}") from error
    found = kind or ", ".join(_architectures(raw)) or "nothing"
    raise _unsupported(
        name, f"holds {found}: of such heads EAGLE-3 alone is served (LlamaForCausalLMEagle3)"
    )


def _config(name: str, raw: Mapping[str, Any], layer: Mapping[str, Any]) -> HeadConfig:
    _refuse_layer(name, layer)
    eagle = raw.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise _unsupported(name, "takes the last hidden state alone (use_aux_hidden_state false)")
    sizes = _sizes(name, layer)
    is_qwen3 = layer.get("model_type", "llama") == "qwen3"
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head_size = _size(name, layer, "head_dim", _QWEN3_HEAD_SIZE if is_qwen3 else 0)
    head_size = head_size or hidden_size // num_heads
    hidden_act = str(layer.get("hidden_act") or "silu")
    activation = _ACTIVATIONS.get(hidden_act)
    if activation is None:
        raise _unsupported(name, f"has the activation {hidden_act}, which is not served")
    return HeadConfig(
        name=name,
        hidden_size=hidden_size,
        intermediate_size=sizes["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=_size(name, layer, "num_key_value_heads", num_heads),
        head_size=head_size,
        eps=_number(name, layer, "rms_norm_eps", _EPS),
        activation=activation,
        has_bias=bool(layer.get("attention_bias")),
        has_qk_norm=is_qwen3,
        vocab_size=sizes["vocab_size"],
        draft_vocab_size=_size(name, raw, "draft_vocab_size", sizes["vocab_size"]),
        target_hidden_size=_size(name, raw, "target_hidden_size", hidden_size),
        taps=_taps(name, raw, eagle),
        norm_before_residual=bool(_flag("norm_before_residual", raw, eagle)),
        norm_before_fc=bool(_flag("norm_before_fc", raw, eagle)),
        rope=_rope(name, layer, head_size),
    )


def _flag(name: str, *places: Mapping[str, Any]) -> Any:
    return next((place[name] for place in places if place.get(name) is not None), None)


def _refuse_layer(name: str, layer: Mapping[str, Any]) -> None:
    if layer.get("model_type", "llama") not in _LAYERS:
        raise _unsupported(
            name, f"is made of layers of {layer['model_type']}; those of Llama and Qwen3 are served"
        )
    if layer.get("num_hidden_layers", 1) != 1:
        raise _unsupported(
            name, f"has {layer['num_hidden_layers']} layers; heads of one are served"
        )
    if any(kind != "full_attention" for kind in layer.get("layer_types") or ()):
        raise _unsupported(name, f"has layers of type {_listed(layer['layer_types'])}")


def _sizes(name: str, layer: Mapping[str, Any]) -> dict[str, int]:
    missing = [size for size in _SIZES if layer.get(size) is None]
    if missing:
        raise _unsupported(name, f"has a config without {_listed(missing)}")
    return {size: _size(name, layer, size, 0) for size in _SIZES}


def _size(name: str, fields: Mapping[str, Any], field: str, default: int) -> int:
    value = fields.get(field)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise _unsupported(name, f"has a config that is not valid: {field} is {value!r}")
    return value


def _number(name: str, fields: Mapping[str, Any], field: str, default: float) -> float:
    value = fields.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _unsupported(name, f"has a config that is not valid: {field} is {value!r}")
    return float(value)


def _rope(name: str, layer: Mapping[str, Any], head_size: int) -> Rope:
    """How the layer's heads turn; older configs have `rope_theta` beside `rope_scaling`."""
    said = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind not in ROPES:
        raise _unsupported(name, f"has rope scaling of type {kind}; served: {_listed(ROPES)}")
    if layer.get("partial_rotary_factor") or said.get("partial_rotary_factor"):
        raise _unsupported(name, "turns a part of each head only (partial_rotary_factor)")
    if head_size % 2:
        raise _unsupported(name, f"has heads of {head_size} values, which do not turn in pairs")
    context = _CONTEXTS[layer.get("model_type", "llama")]
    theta = _number(name, layer, "rope_theta", _THETA)
    rope = Rope(
        size=head_size,
        theta=_number(name, said, "rope_theta", theta),
        kind=kind,
        parameters=said,
        context=_size(name, layer, "max_position_embeddings", context),
    )
    try:
        rope.frequencies()
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _unsupported(name, f"has rope scaling that is not valid: {error!r}") from error
    return rope


def _taps(name: str, raw: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """After how many layers the head takes hidden states.

    On the top level the numbers say just that. Under eagle_config two customs live beside each
    other: the same, and numbers of layers whose output is meant, one less each. The lowest tap is
    after layer 1 (of 0, 1, …) in both, so that those of the second custom begin with 1; SGLang
    tells them apart the same way.
    """
    given = raw.get("eagle_aux_hidden_state_layer_ids")
    nested = given is None
    if nested:
        given = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not given:
        return None
    if not isinstance(given, list) or not all(type(tap) is int for tap in given):
        raise _unsupported(name, "has eagle_aux_hidden_state_layer_ids that are no list of numbers")
    return tuple(tap + 1 for tap in given) if nested and given[0] == 1 else tuple(given)


def _listed(items: Any) -> str:
    return ", ".join(str(item) for item in items)


def _unsupported(name: str, what: str) -> ModelUnsupported:
    return ModelUnsupported(f"the draft head {name} {what}", param="draft_model")
