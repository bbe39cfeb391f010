"""GGUF files: the config their metadata spells, and their tensors under transformers' names.

Names and reorderings come from transformers' GGUF support (q and k rows of the llama family are
stored in another order, Gemma's norms with one added), numbers from the gguf package. A metadata
key that bears on the computation and that we do not understand is refused by name: a file that
half fits would answer with nonsense. Quantised blocks are given as they are (`gguf_blocks.py`),
reordered by rows, or expanded to fp32, as the loader asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, dequantize, get_tensor_name_map
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from plait.platform.errors import ModelUnsupported
from plait.platform.model.gguf_blocks import BLOCK_TYPES, read_blocks
from plait.platform.model.gguf_header import GgufTensor, read_header
from plait.platform.model.tensor_files import Shape
from plait.platform.model.weight_format import WeightFormat, at_rows, check_finite, join
from plait.platform.ops.quantized_weight import Quantized, Scales

# GGUF architecture → transformers model type.
_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
}
# Keys that transformers' mapping leaves out, and the config fields they fill.
_MORE_FIELDS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Of those, the ones that no tensor's shape bears out.
_UNSHAPED = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
# Keys that say nothing the config needs, or nothing at the values checked below.
_HARMLESS = frozenset(
    {"rope.dimension_count", "attention.value_length", "attention.causal", "vocab_size"}
)
_NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}  # their number of layers, 27B each
_VALUES_AT_ONCE = 2**20
_ROPE_SCALING = "rope.scaling."
_SCALING_KEYS = frozenset({"type", "factor", "original_context_length", "finetuned"})
# What yarn's are called by transformers, and what others must be to change nothing.
_YARN_FIELDS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_IDLE_SCALING = {
    "attn_factor": (1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_ext_factor": (1.0, -1.0),
    "yarn_log_multiplier": (0.0,),
}
_ROPE_FACTORS = "rope_freqs.weight"
_FORMATS = {
    kind: WeightFormat(
        name=kind.name,
        bits=block.bits,
        group=block.group,
        has_minimums=kind.name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"),
        scales=Scales.TWO_LEVELS if kind.name.endswith("_K") else Scales.FLOAT16,
    )
    for kind, block in BLOCK_TYPES.items()
}


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The transformers config that a GGUF file's metadata spells, as a dict."""
    header = read_header(path)
    metadata, architecture = header.metadata, header.architecture
    if architecture not in _MODEL_TYPES:
        raise ModelUnsupported(
            f"{path.name} has the GGUF architecture '{architecture}', which is not served from "
            f"GGUF (served: {', '.join(_MODEL_TYPES)}); its safetensors checkpoint may be"
        )
    if metadata.get("split.count", 1) > 1:
        raise ModelUnsupported(f"{path.name} is one part of a split GGUF; join the parts first")
    model_type = _MODEL_TYPES[architecture]
    own = {
        key.removeprefix(f"{architecture}."): value
        for key, value in metadata.items()
        if key.startswith(f"{architecture}.")
    }
    config = {**_fields(path, model_type, own), **_special_tokens(metadata)}
    names = {tensor.name for tensor in header.tensors}
    config["tie_word_embeddings"] = "output.weight" not in names
    config.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    return config


def _fields(path: Path, model_type: str, own: Mapping[str, Any]) -> dict[str, Any]:
    mapping_name = "gemma3" if model_type == "gemma3_text" else model_type
    mapping: dict[str, str | None] = {**_MORE_FIELDS}
    theirs: Any = GGUF_CONFIG_MAPPING
    mapping.update(theirs[mapping_name])
    _check_keys(path, own)
    config: dict[str, Any] = {"model_type": model_type}
    config.update(GGUF_CONFIG_DEFAULTS_MAPPING.get(mapping_name, {}))
    for key, value in own.items():
        field = mapping.get(key)
        if field is not None and not _is_idle_window(key, value, own):
            _check_field(path, model_type, key, value, field)
            config[field] = value
        elif key == "rope.freq_base":  # a few mappings leave it out
            config["rope_theta"] = value
        elif key not in _HARMLESS and key not in mapping and not key.startswith(_ROPE_SCALING):
            raise ModelUnsupported(f"{path.name}: GGUF key '{key}' = {value} is not understood")
    scaling = _rope_scaling(path, own)
    if scaling:
        config["rope_scaling"] = scaling
    _check_head_size(path, config, own)
    if model_type in _LARGEST_GEMMA:
        # Only the 27B models scale attention by another size than their heads'.
        largest = config["num_hidden_layers"] == _LARGEST_GEMMA[model_type]
        size = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = size if largest else config["head_dim"]
    return config


def _rope_scaling(path: Path, own: Mapping[str, Any]) -> dict[str, Any] | None:
    given = {
        key.removeprefix(_ROPE_SCALING): value
        for key, value in own.items()
        if key.startswith(_ROPE_SCALING)
    }
    factor = given.get("factor", 0)
    kind = given.get("type", "linear" if factor else "none")  # as llama.cpp takes it
    if kind not in ("none", "linear", "yarn"):
        raise ModelUnsupported(f"{path.name}: rope scaling '{kind}' is not served from GGUF")
    fields = _YARN_FIELDS if kind == "yarn" else {}
    for key, value in given.items():
        if key not in _SCALING_KEYS and key not in fields and value not in _idle(key):
            raise ModelUnsupported(
                f"{path.name}: GGUF key '{_ROPE_SCALING}{key}' = {value} is not served"
            )
    if kind == "none":
        return None
    if not isinstance(factor, float | int) or not 0 < factor < math.inf:
        raise ModelUnsupported(f"{path.name}: rope scaling '{kind}' has no factor ({factor!r})")
    scaling = {"rope_type": kind, "factor": factor}
    scaling |= {field: given[key] for key, field in fields.items() if key in given}
    original = given.get("original_context_length")
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _idle(key: str) -> tuple[float, ...]:
    return _IDLE_SCALING.get(key, ())


def _check_keys(path: Path, own: Mapping[str, Any]) -> None:
    """What a model cannot do without must be there, and be no more than a number."""
    missing = [key for key in _NEEDED if key not in own]
    if not any(key in own for key in _EPSILONS):
        missing.append(_EPSILONS[0])
    if missing:
        raise ModelUnsupported(
            f"{path.name} lacks the GGUF keys {', '.join(missing)}; convert the model anew"
        )
    for key in _NEEDED:
        if not isinstance(own[key], int) or own[key] < 1:
            raise ModelUnsupported(f"{path.name}: GGUF key '{key}' = {own[key]!r} is not served")
    if own.get("attention.causal", True) is not True:
        raise ModelUnsupported(f"{path.name}: its attention is not causal (attention.causal)")


def _is_idle_window(key: str, value: Any, own: Mapping[str, Any]) -> bool:
    """Whether it is a window that no context outgrows."""
    is_window = key == "attention.sliding_window" and isinstance(value, int)
    return is_window and bool(value >= own["context_length"])


def _check_field(path: Path, model_type: str, key: str, value: Any, field: str) -> None:
    """A field that the family's class never looks at would be dropped without a word."""
    if isinstance(value, list):
        raise ModelUnsupported(f"{path.name}: '{key}' differs by layer; not served from GGUF")
    if key not in _UNSHAPED:
        return
    defaults = CONFIG_MAPPING[model_type]()
    is_off = key == "attention.sliding_window" and not getattr(defaults, "use_sliding_window", True)
    if is_off or not hasattr(defaults, field):
        raise ModelUnsupported(
            f"{path.name}: GGUF key '{key}' = {value} has no effect in {model_type} models; its "
            "safetensors checkpoint may be served"
        )


def _check_head_size(path: Path, config: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Head sizes that differ between K, V and rope are told by keys the config has no field for."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, size) != size:
            raise ModelUnsupported(
                f"{path.name}: '{key}' is {own[key]} where a head has {size}; not served from GGUF"
            )


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    named = {"bos": "bos", "eos": "eos", "padding": "pad"}
    found = {f: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, f in named.items()}
    tokens: dict[str, Any] = {
        f"{f}_token_id": value for f, value in found.items() if value is not None
    }
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(x for x in ends if x is not None))
    if len(ends) > 1:
        tokens["eos_token_id"] = ends
    return tokens


class GgufFile:
    """The tensors of a GGUF file under the names of `model`'s parameters, read on demand."""

    def __init__(self, path: Path, model: Any) -> None:
        header = read_header(path)
        self._data = np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)
        self._infos = {info.name: info for info in header.tensors}
        make = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self._processor = make(config=model.config.to_dict())
        self._names = _tensor_names(header.architecture, model, self._processor)
        self.rope_factors = self._take_rope_factors()
        self._parts: dict[str, list[GgufTensor]] = {}
        unknown = []
        for info in self._infos.values():
            target = self._names.get(info.name) or self._names.get(
                info.name.removesuffix(".weight")
            )
            if target is None:
                unknown.append(info.name)
            else:
                self._parts.setdefault(target, []).append(info)
        if unknown:
            raise ModelUnsupported(
                f"{path.name}: {len(unknown)} tensors have no place in {type(model).__name__}: "
                f"{', '.join(unknown[:4])}"
            )
        self._shapes = {name: self._shape(model, name) for name in self._parts}
        self._formats = {
            name: _FORMATS[infos[0].kind]
            for name, infos in self._parts.items()
            if len({info.kind for info in infos}) == 1
            and infos[0].kind in _FORMATS
            and len(infos[0].shape) > 1
        }

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of what `read` gives."""
        return self._shapes

    @property
    def dtypes(self) -> frozenset[str]:
        """GGUF's names of the types in the file."""
        return frozenset(info.kind.name for info in self._infos.values())

    @property
    def integers(self) -> frozenset[str]:
        """Tensors that hold whole numbers, and so no weights."""
        return frozenset(
            name
            for name, infos in self._parts.items()
            if any(info.kind.name.startswith("I") and "Q" not in info.kind.name for info in infos)
        )

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """Of what `read_quantized` gives."""
        return self._formats

    def _take_rope_factors(self) -> Tensor | None:
        """Llama 3 files carry their rope scaling as divisors of the inverse frequencies."""
        info = self._infos.pop(_ROPE_FACTORS, None)
        if info is None:
            return None
        factors = torch.from_numpy(self._numbers(info))
        if factors.dim() != 1 or not bool((factors.isfinite() & (factors > 0)).all()):
            raise ModelUnsupported(f"{_ROPE_FACTORS} holds no factors of frequencies")
        return factors

    def _shape(self, model: Any, name: str) -> Shape:
        """What `read` will give: stored shapes, or the model's where parts are joined."""
        infos = self._parts[name]
        if len(infos) > 1 or len(infos[0].shape) != len(model.get_parameter(name).shape):
            return tuple(model.get_parameter(name).shape)
        return infos[0].shape

    def _rows(self, info: GgufTensor) -> np.ndarray:
        """The bytes of a tensor, row by row."""
        return self._data[info.start : info.end].reshape(math.prod(info.shape[:-1]), -1)

    def _numbers(self, info: GgufTensor) -> np.ndarray:
        rows = self._rows(info)
        num_rows = len(rows)
        numbers = np.empty((num_rows, info.shape[-1]), dtype=np.float32)
        # gguf takes 16 rows at a time, which for short rows is mostly overhead: give it long ones.
        step = max(1, _VALUES_AT_ONCE // info.shape[-1])
        for start in range(0, num_rows, step):
            piece = rows[start : start + step].reshape(1, -1)
            numbers[start : start + step] = dequantize(piece, info.kind).reshape(-1, info.shape[-1])
        return numbers.reshape(info.shape)

    def read(self, name: str) -> Tensor:
        """One parameter in fp32, in transformers' order."""
        numbers = self._processed(name, [self._numbers(info) for info in self._parts[name]])
        if any(info.kind not in _PLAIN for info in self._parts[name]):
            check_finite(name, numbers)
        return numbers

    def read_quantized(self, name: str) -> Quantized:
        """One parameter as its blocks have it, in transformers' order; name one of `formats`."""
        infos = self._parts[name]
        weights = [read_blocks(self._rows(x), x.kind, x.shape[-1]) for x in infos]
        # What transformers does to rows is found by giving it their numbers.
        numbers, first = [], 0
        for info in infos:
            count = math.prod(info.shape[:-1])
            rows = np.arange(first, first + count).reshape(*info.shape[:-1], 1)
            numbers.append(rows)
            first += count
        order = self._processed(name, numbers).squeeze(-1)
        weight = join(weights) if len(weights) > 1 else weights[0]
        check_finite(name, weight.scales, weight.mins)
        is_as_it_was = torch.equal(order, torch.arange(len(weight.codes)))
        return weight if is_as_it_was else at_rows(weight, order)

    def _processed(self, name: str, parts: list[np.ndarray]) -> Tensor:
        """A parameter from its tensors in the file, by transformers' rules."""
        joined: dict[str, Any] = {"tensors": {}}
        tensor: Tensor | None = None
        for info, part in zip(self._parts[name], parts, strict=True):
            result = self._processor.process(
                weights=part,
                name=info.name,
                tensor_key_mapping=self._names,
                parsed_parameters=joined,
            )
            if result.name is not None:
                tensor = torch.from_numpy(np.ascontiguousarray(result.weights))
        return joined["tensors"][name] if tensor is None else tensor


def _tensor_names(architecture: str, model: Any, processor: TensorProcessor) -> dict[str, str]:
    """GGUF tensor name → name of the model's parameter.

    transformers has the same, but makes gguf's table anew for every module of the model.
    """
    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, model.config.num_hidden_layers)
    names: dict[str, str] = {}
    for parameter in map(processor.preprocess_name, model.state_dict()):
        stem, dot, ending = parameter.rpartition(".")
        suffix = dot + ending if ending in ("weight", "bias") else ""
        found = table.get_name(stem if suffix else parameter)
        if found is None:
            processor.perform_fallback_tensor_mapping(names, suffix, "", parameter)
        else:
            names[found + suffix] = parameter
    return names
