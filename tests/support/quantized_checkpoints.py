"""Checkpoints quantised in other projects' formats, each beside a plain one of the same numbers.

`write_pair("gptq", …)` writes a tiny model twice: with the layers' weights as that format packs
codes, scales and zero points, and with what they stand for by the format's own definition, in fp32.
Codes are random in the sense of round to nearest; packing goes value by value, slowly and plainly.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import make_checkpoint, rewrite_config

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass
class Layer:
    """Codes `[N, K]`, scales and zero points `[N, groups]` of one weight."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_of: np.ndarray  # [K]

    @property
    def numbers(self) -> torch.Tensor:
        zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
        return torch.from_numpy((self.codes.astype(np.float64) - zeros) * scales).float()


@dataclass
class Kind:
    """A format with its settings."""

    pack: Any  # (kind, layer) → tensors by ending
    config: dict[str, Any]
    bits: int = 4
    group: int = 32  # -1: one for all inputs
    is_symmetric: bool = True
    is_shuffled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def quantised(kind: Kind, weight: np.ndarray, random: np.random.Generator) -> Layer:
    num_outputs, num_inputs = weight.shape
    group = num_inputs if kind.group == -1 else kind.group
    group_of = np.arange(num_inputs) // group
    if kind.is_shuffled:
        group_of = random.permutation(group_of)
    num_groups = group_of.max() + 1
    top = 2**kind.bits - 1
    scales = np.empty((num_outputs, num_groups), dtype=np.float16)
    zeros = np.full((num_outputs, num_groups), 2 ** (kind.bits - 1), dtype=np.int64)
    for g in range(num_groups):
        part = weight[:, group_of == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if kind.is_symmetric:
            scales[:, g] = np.maximum(-low, high) * 2 / top
        else:
            scales[:, g] = (high - low) / top
            zeros[:, g] = np.clip(np.round(-low / scales[:, g].astype(float)), 1, top)
    scaled = np.round(weight / scales.astype(float)[:, group_of]) + zeros[:, group_of]
    return Layer(np.clip(scaled, 0, top).astype(np.int64), scales, zeros, group_of)


def words(values: np.ndarray, bits: int, axis: int, order: list[int] | None = None) -> torch.Tensor:
    """Values side by side along `axis` in words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    values = np.moveaxis(values, axis, -1)
    pad = -values.shape[-1] % per_word
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, pad)])
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // per_word), dtype=np.uint32)
    for word in range(packed.shape[-1]):
        for i in range(per_word):
            column = word * per_word + (order[i] if order else i)
            packed[..., word] |= values[..., column].astype(np.uint32) << np.uint32(i * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32))


def _tensor(values: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if dtype is None else tensor.to(dtype)


def _gptq(kind: Kind, layer: Layer) -> dict[str, torch.Tensor]:
    less = 0 if kind.config["checkpoint_format"] == "gptq_v2" else 1
    return {
        "qweight": words(layer.codes.T, kind.bits, 0),
        "qzeros": words(layer.zeros.T - less, kind.bits, 1),
        "scales": _tensor(layer.scales.T),
        "g_idx": _tensor(layer.group_of, torch.int32),
    }


def _awq(kind: Kind, layer: Layer) -> dict[str, torch.Tensor]:
    return {
        "qweight": words(layer.codes.T, 4, 1, AWQ_ORDER),
        "qzeros": words(layer.zeros.T, 4, 1, AWQ_ORDER),
        "scales": _tensor(layer.scales.T),
    }


def _compressed_packed(kind: Kind, layer: Layer) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": words(layer.codes, kind.bits, 1),
        "weight_scale": _tensor(layer.scales),
        "weight_shape": torch.tensor(layer.codes.shape),
    }
    if not kind.is_symmetric:
        tensors["weight_zero_point"] = words(layer.zeros, kind.bits, 0)
    return tensors


def _compressed_int8(kind: Kind, layer: Layer) -> dict[str, torch.Tensor]:
    tensors = {
        "weight": _tensor(layer.codes - 128, torch.int8),
        "weight_scale": _tensor(layer.scales, torch.float32),
    }
    if not kind.is_symmetric:
        tensors["weight_zero_point"] = _tensor(layer.zeros - 128, torch.int8)
    return tensors


def gptq(**settings: Any) -> Kind:
    """GPTQ; `form` is the format's version."""
    form = settings.pop("form", "gptq")
    kind = Kind(pack=_gptq, config={}, **settings)
    kind.config = {
        "quant_method": "gptq",
        "bits": kind.bits,
        "group_size": kind.group,
        "sym": kind.is_symmetric,
        "desc_act": kind.is_shuffled,
        "checkpoint_format": form,
    }
    return kind


def awq(**settings: Any) -> Kind:
    """AWQ for GEMM kernels."""
    kind = Kind(pack=_awq, config={}, is_symmetric=False, **settings)
    kind.config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": kind.group,
        "zero_point": True,
        "version": "gemm",
    }
    return kind


def compressed(*, form: str, dynamic: bool = False, **settings: Any) -> Kind:
    """compressed-tensors; `dynamic`: activations of 8 bits."""
    pack = {"pack-quantized": _compressed_packed, "int-quantized": _compressed_int8}[form]
    kind = Kind(pack=pack, config={}, **settings)
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    weights = {
        "num_bits": kind.bits,
        "type": "int",
        "symmetric": kind.is_symmetric,
        "strategy": "channel" if kind.group == -1 else "group",
        "group_size": None if kind.group == -1 else kind.group,
        "actorder": None,
    }
    kind.config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs if dynamic else None,
            }
        },
    }
    return kind


def write_pair(kind: Kind, family: str, directory: Path, **fields: Any) -> tuple[Path, Path]:
    """Write `family` quantised and plain; returns both directories."""
    random = np.random.default_rng(0)
    plain = make_checkpoint(family, directory / "plain", **fields)
    packed = directory / "packed"
    shutil.copytree(plain, packed)
    numbers, tensors = load_file(plain / "model.safetensors"), {}
    for name, weight in numbers.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj") or weight.dim() != 2:
            tensors[name] = weight
            continue
        layer = quantised(kind, weight.numpy().astype(np.float64), random)
        tensors |= {f"{stem}.{ending}": t for ending, t in kind.pack(kind, layer).items()}
        numbers[name] = layer.numbers
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(packed, quantization_config=kind.config)
    return packed, plain
