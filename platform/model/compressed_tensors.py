"""Checkpoints of the compressed-tensors library: whole numbers of 4 and 8 bits.

A layer has weight_packed int32 [N, K / per word] and weight_shape, or weight int8 [N, K], beside
weight_scale [N, groups] and perhaps weight_zero_point, which packed weights have packed along N.
Activations that are quantised as they come are a matter of `--quantized-activations`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.platform.errors import ModelUnsupported
from plait.platform.model.stored_weight import (
    Config,
    StoredWeight,
    affine,
    check_groups,
    refuse,
    shape_of,
    unpack_words,
)
from plait.platform.model.tensor_files import SafetensorsFiles
from plait.platform.model.weight_format import WeightFormat
from plait.platform.ops.quantized_weight import Quantized, Scales


def check_compressed(config: Config) -> None:
    """Refuse settings that are not read."""
    form = config.get("format", "dense")
    if form not in ("pack-quantized", "int-quantized"):
        refuse(f"compressed-tensors in the format '{form}' (pack-quantized and int-quantized are)")
    for setting in ("sparsity_config", "transform_config"):
        given = config.get(setting) or {}
        if given and given.get("format", "") != "dense":
            refuse(f"compressed-tensors with a {setting}")
    for group in config.get("config_groups", {}).values():
        _check_scheme(group, form)


def _check_scheme(scheme: Config, form: str) -> None:
    weights, inputs = scheme.get("weights") or {}, scheme.get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if scheme.get("format", form) not in (form, None):
        refuse(f"compressed-tensors in several formats ({form} and {scheme['format']})")
    if kind != "int" or bits not in (4, 8):
        refuse(f"compressed-tensors of {bits}-bit {kind} weights (int of 4 and 8 bits are)")
    if weights.get("strategy", "tensor") not in ("tensor", "channel", "group"):
        refuse(f"compressed-tensors with a scale by {weights['strategy']}")
    if inputs is not None and (inputs.get("type", "int") != "int" or not inputs.get("dynamic")):
        refuse("compressed-tensors with activations of stored ranges or of floating point")
    if scheme.get("output_activations"):
        refuse("compressed-tensors with quantised outputs")


def find_compressed(files: SafetensorsFiles, config: Config) -> dict[str, StoredWeight]:
    """All quantised weights, by the name of a plain checkpoint."""
    schemes = config.get("config_groups", {}).values()
    sizes = {int(scheme["weights"]["num_bits"]) for scheme in schemes}
    found: dict[str, StoredWeight] = {}
    for name in files.shapes:
        stem, _, ending = name.rpartition(".")
        if ending != "weight_scale":
            continue
        for refused in ("input_scale", "weight_g_idx"):
            if f"{stem}.{refused}" in files.shapes:
                refuse(f"compressed-tensors with {refused} at {stem}")
        if f"{stem}.weight_packed" in files.shapes:
            found[f"{stem}.weight"] = _packed_weight(files, stem, sizes)
        else:
            found[f"{stem}.weight"] = _int8_weight(files, stem)
    return found


def _packed_weight(files: SafetensorsFiles, stem: str, sizes: set[int]) -> StoredWeight:
    names, zero_name = _compressed_names(files, stem, "weight_packed")
    num_outputs, num_inputs = map(int, files.read(f"{stem}.weight_shape").tolist())
    num_words = shape_of(files, names[0])[1]
    fitting = [bits for bits in sorted(sizes) if -(-num_inputs * bits // 32) == num_words]
    if not fitting:
        raise ModelUnsupported(f"{stem}: {num_words} words do not hold {num_inputs} weights")
    bits = fitting[0]
    half = 2 ** (bits - 1)
    group = _group_of(files, stem, num_inputs)

    def read() -> Quantized:
        codes = unpack_words(files.read(names[0]), bits, 1)[:, :num_inputs]
        scales = _scales(files, stem, num_outputs)
        zeros = torch.full_like(scales, half)
        if zero_name is not None:
            zeros = files.read(zero_name)
            is_packed = zeros.dtype is torch.int32
            zeros = unpack_words(zeros, bits, 0)[:num_outputs] if is_packed else zeros.int() + half
        return affine(codes, bits, group, scales, zeros)

    return StoredWeight(
        shape=(num_outputs, num_inputs),
        format=_compressed_format(bits, group, num_inputs, zero_name),
        parts=(*names, f"{stem}.weight_shape"),
        read=read,
    )


def _int8_weight(files: SafetensorsFiles, stem: str) -> StoredWeight:
    names, zero_name = _compressed_names(files, stem, "weight")
    num_outputs, num_inputs = shape_of(files, names[0])
    group = _group_of(files, stem, num_inputs)

    def read() -> Quantized:
        stored = files.read(names[0])
        if stored.dtype is not torch.int8:
            raise ModelUnsupported(f"{names[0]} is {stored.dtype} where int8 is announced")
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


def _group_of(files: SafetensorsFiles, stem: str, num_inputs: int) -> int:
    shape = shape_of(files, f"{stem}.weight_scale")
    num_groups = shape[1] if len(shape) > 1 else 1
    if num_inputs % num_groups:
        raise ModelUnsupported(f"{stem} has {num_groups} scales for {num_inputs} inputs")
    group = num_inputs // num_groups
    check_groups(stem, num_inputs, group, num_groups)
    return group


def _scales(files: SafetensorsFiles, stem: str, num_outputs: int) -> Tensor:
    scales = files.read(f"{stem}.weight_scale").float()
    scales = scales if scales.dim() == 2 else scales.view(-1, 1)
    return scales.expand(num_outputs, -1)
