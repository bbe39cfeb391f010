"""Checkpoints of the compressed-tensors library: whole numbers of 4 and 8 bits.

A layer has weight_packed int32 [N, K / per word] and weight_shape, or weight int8 [N, K], beside
weight_scale [N, groups] and perhaps weight_zero_point, which packed weights have packed along N.
Activations that are quantised as they come are a matter of `--quantized-activations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.platform.errors import ModelUnsupported
from plait.platform.model.stored_weight import (
    SCALES,
    WORDS,
    Config,
    StoredWeight,
    affine,
    check_groups,
    check_sizes,
    matrix_of,
    part_of,
    refuse,
    unpack_words,
)
from plait.platform.model.tensor_files import SafetensorsFiles
from plait.platform.model.weight_format import WeightFormat
from plait.platform.ops.quantized_weight import Quantized, Scales


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheme:
    """How one of the config's groups of layers is quantised."""

    bits: int
    group: int  # 0: one scale an output, or one for all
    has_zeros: bool

    @classmethod
    def of(cls, weights: Config) -> _Scheme:
        size = weights.get("group_size") or -1
        strategy = weights.get("strategy") or ("group" if size > 0 else "channel")
        return cls(
            bits=weights["num_bits"],
            group=size if strategy == "group" else 0,
            has_zeros=not weights.get("symmetric", True),
        )


def check_compressed(config: Config) -> None:
    """Refuse settings that are not read."""
    form = config.get("format", "dense")
    if form not in ("pack-quantized", "int-quantized"):
        refuse(f"compressed-tensors in the format '{form}' (pack-quantized and int-quantized are)")
    for setting in ("sparsity_config", "transform_config"):
        given = config.get(setting) or {}
        if given and given.get("format", "") != "dense":
            refuse(f"compressed-tensors with a {setting}")
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict) or not groups:
        refuse("compressed-tensors without config_groups")
    for name, group in groups.items():
        if not isinstance(group, dict):
            refuse(f"compressed-tensors by the preset '{name}' (whole schemes are read)")
        _check_scheme(group, form)


def _check_scheme(scheme: Config, form: str) -> None:
    weights, inputs = scheme.get("weights") or {}, scheme.get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if scheme.get("format", form) not in (form, None):
        refuse(f"compressed-tensors in several formats ({form} and {scheme['format']})")
    if kind != "int" or bits not in (4, 8):
        refuse(f"compressed-tensors of {bits}-bit {kind} weights (int of 4 and 8 bits are)")
    if weights.get("strategy") not in (None, "tensor", "channel", "group"):
        refuse(f"compressed-tensors with a scale by {weights['strategy']}")
    check_sizes({k: v for k, v in weights.items() if v is not None}, "group_size")
    if weights.get("strategy") == "group" and _Scheme.of(weights).group < 1:
        refuse("compressed-tensors in groups of no size")
    if inputs is not None and (inputs.get("type", "int") != "int" or not inputs.get("dynamic")):
        refuse("compressed-tensors with activations of stored ranges or of floating point")
    if scheme.get("output_activations"):
        refuse("compressed-tensors with quantised outputs")


def find_compressed(files: SafetensorsFiles, config: Config) -> dict[str, StoredWeight]:
    """All quantised weights, by the name of a plain checkpoint."""
    schemes = [_Scheme.of(group["weights"]) for group in config["config_groups"].values()]
    found: dict[str, StoredWeight] = {}
    for name in files.shapes:
        stem, _, ending = name.rpartition(".")
        if ending != "weight_scale":
            continue
        for refused in ("input_scale", "weight_g_idx"):
            if f"{stem}.{refused}" in files.shapes:
                refuse(f"compressed-tensors with {refused} at {stem}")
        if f"{stem}.weight_packed" in files.shapes:
            found[f"{stem}.weight"] = _packed_weight(files, stem, schemes)
        else:
            found[f"{stem}.weight"] = _int8_weight(files, stem, schemes)
    return found


def _packed_weight(files: SafetensorsFiles, stem: str, schemes: Sequence[_Scheme]) -> StoredWeight:
    names, zero_name = _compressed_names(files, stem, "weight_packed")
    part_of(files, f"{stem}.weight_shape", ("I64", "I32"), (2,))
    num_outputs, num_inputs = map(int, files.read(f"{stem}.weight_shape").tolist())
    num_rows, num_words = matrix_of(files, names[0], WORDS)
    fitting = [s for s in schemes if -(-num_inputs * s.bits // 32) == num_words]
    if not fitting or num_rows != num_outputs:
        raise ModelUnsupported(
            f"{stem}: {num_rows} rows of {num_words} words do not hold {num_outputs} rows of "
            f"{num_inputs} weights"
        )
    group = _group_of(files, stem, (num_outputs, num_inputs), fitting)
    bits = fitting[0].bits
    half = 2 ** (bits - 1)
    if zero_name is not None:
        _check_zeros(files, zero_name, (num_outputs, num_inputs // group), bits)

    def read() -> Quantized:
        codes = unpack_words(files.read(names[0]), bits, 1)[:, :num_inputs]
        scales = _scales(files, stem, num_outputs)
        zeros = torch.full_like(scales, half)
        if zero_name is not None:
            zeros = files.read(zero_name)
            is_packed = zeros.dtype is torch.int32
            zeros = unpack_words(zeros, bits, 0)[:num_outputs] if is_packed else zeros.int() + half
            zeros = zeros.view(-1, scales.shape[1])
        return affine(codes, bits, group, scales, zeros)

    return StoredWeight(
        shape=(num_outputs, num_inputs),
        format=_compressed_format(bits, group, num_inputs, zero_name),
        parts=(*names, f"{stem}.weight_shape"),
        read=read,
    )


def _int8_weight(files: SafetensorsFiles, stem: str, schemes: Sequence[_Scheme]) -> StoredWeight:
    names, zero_name = _compressed_names(files, stem, "weight")
    num_outputs, num_inputs = matrix_of(files, names[0], ("I8",))
    group = _group_of(files, stem, (num_outputs, num_inputs), schemes)
    if zero_name is not None:
        _check_zeros(files, zero_name, (num_outputs, num_inputs // group), 0)

    def read() -> Quantized:
        stored = files.read(names[0])
        scales = _scales(files, stem, num_outputs)
        zeros = torch.full_like(scales, 128)
        if zero_name is not None:
            zeros = zeros + files.read(zero_name).float().view(-1, scales.shape[1])
        return affine(stored.view(torch.uint8) ^ 128, 8, group, scales, zeros)

    return StoredWeight(
        shape=(num_outputs, num_inputs),
        format=_compressed_format(8, group, num_inputs, zero_name),
        parts=names,
        read=read,
    )


def _compressed_names(
    files: SafetensorsFiles, stem: str, weight: str
) -> tuple[tuple[str, ...], str | None]:
    zero_name = f"{stem}.weight_zero_point"
    has_zeros = zero_name in files.shapes
    names = (f"{stem}.{weight}", f"{stem}.weight_scale", *([zero_name] if has_zeros else ()))
    return names, zero_name if has_zeros else None


def _compressed_format(bits: int, group: int, num_inputs: int, zero: str | None) -> WeightFormat:
    return WeightFormat(
        name=f"compressed int{bits}",
        bits=bits,
        group=0 if group >= num_inputs else group,
        has_minimums=zero is not None,
        scales=Scales.FLOAT16 if zero is None else Scales.FLOAT32,
    )


def _group_of(
    files: SafetensorsFiles, stem: str, shape: tuple[int, int], schemes: Sequence[_Scheme]
) -> int:
    """How many inputs share a scale: what the scales' shape tells, if one of `schemes` has it."""
    name = f"{stem}.weight_scale"
    num_outputs, num_inputs = shape
    scales = part_of(files, name, SCALES)
    num_groups = scales[1] if len(scales) > 1 else 1
    if scales not in {(), (1,), (1, 1), (num_outputs,), (num_outputs, num_groups)}:
        raise ModelUnsupported(f"{name} has shape {list(scales)} for {num_outputs} outputs")
    if num_inputs % num_groups:
        raise ModelUnsupported(f"{stem} has {num_groups} scales for {num_inputs} inputs")
    group = num_inputs // num_groups
    check_groups(stem, num_inputs, group, num_groups)
    found = [s for s in schemes if min(s.group or num_inputs, num_inputs) == group]
    if not found:
        raise ModelUnsupported(
            f"{stem} has {num_groups} scales for {num_inputs} inputs, but the quantization_config "
            f"has groups of {', '.join(sorted({str(s.group or 'all') for s in schemes}))}"
        )
    if all(s.has_zeros for s in found) and f"{stem}.weight_zero_point" not in files.shapes:
        raise ModelUnsupported(
            f"{stem}.weight_zero_point is missing, and the quantization_config is not symmetric"
        )
    return group


def _check_zeros(files: SafetensorsFiles, name: str, shape: tuple[int, int], bits: int) -> None:
    """Zero points are packed along the outputs (`bits` > 0 where they may be), or int8 each."""
    num_outputs, num_groups = shape
    if bits and files.kinds[name] == "I32":
        part_of(files, name, WORDS, (-(-num_outputs * bits // 32), num_groups))
        return
    found = part_of(files, name, ("I8",))
    flat = {(num_outputs,), (), (1,), (1, 1)} if num_groups == 1 else set()
    if found not in {shape, *flat}:
        raise ModelUnsupported(f"{name} has shape {list(found)}, not {list(shape)}")


def _scales(files: SafetensorsFiles, stem: str, num_outputs: int) -> Tensor:
    scales = files.read(f"{stem}.weight_scale").float()
    scales = scales if scales.dim() == 2 else scales.view(-1, 1)
    return scales.expand(num_outputs, -1)
