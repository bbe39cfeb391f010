"""One weight of a quantised checkpoint, and what all formats of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.platform.errors import ModelUnsupported
from plait.platform.model.tensor_files import SafetensorsFiles, Shape
from plait.platform.model.weight_format import WeightFormat
from plait.platform.ops.quantized_weight import Quantized

Config = Mapping[str, Any]  # quantization_config of config.json

# What a part may be stored as, in safetensors' words.
WORDS = ("I32",)
SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """One weight of a quantised checkpoint."""

    shape: Shape
    format: WeightFormat
    parts: tuple[str, ...]  # names of the tensors that it is made of
    read: Callable[[], Quantized]
    why_not: str = ""  # why our layers cannot take its codes; it can be expanded all the same


def refuse(what: str) -> NoReturn:
    """Raise `ModelUnsupported` for a way of quantising."""
    raise ModelUnsupported(
        f"the checkpoint is quantised with {what}, which is not served; use another quantised "
        "version, a GGUF file, or its unquantised checkpoint with --quantization int8 or int4"
    )


def unpack_words(words: Tensor, bits: int, axis: int) -> Tensor:
    """Fields of `bits` bits in int32 words, the lowest first, side by side along `axis`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    fields: Tensor = (
        words.unsqueeze(axis + 1) >> shifts.view(-1, *[1] * (words.dim() - 1 - axis))
    ) & (2**bits - 1)
    return fields.to(torch.uint8).flatten(axis, axis + 1)


def affine(codes: Tensor, bits: int, group: int, scales: Tensor, zeros: Tensor) -> Quantized:
    """`scale * (code - zero)`, with scales and zeros `[N, groups]`."""
    scales = scales.float().contiguous()
    mins = -scales * zeros.float()
    return Quantized(codes=codes.contiguous(), bits=bits, group=group, scales=scales, mins=mins)


def check_groups(stem: str, num_inputs: int, group: int, num_groups: int) -> None:
    """Refuse groups that kernels cannot read, or that are not as many as there are scales."""
    if group < 1 or (group % 16 and group < num_inputs):
        refuse(f"groups of {group} inputs at {stem} (multiples of 16 are)")
    if -(-num_inputs // group) != num_groups:
        raise ModelUnsupported(
            f"{stem} has {num_groups} scales for {num_inputs} inputs in groups of {group}"
        )


def check_sizes(config: Config, *keys: str) -> None:
    """Refuse settings that are no whole numbers."""
    for key in keys:
        value = config.get(key, 0)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelUnsupported(
                f"quantization_config has {key} = {value!r}, which is no whole number"
            )


def matrix_of(files: SafetensorsFiles, name: str, kinds: tuple[str, ...]) -> tuple[int, int]:
    """Shape of a matrix that a quantised layer must have."""
    shape = part_of(files, name, kinds)
    if len(shape) != 2:
        raise ModelUnsupported(f"{name} of a quantised layer is no matrix: {list(shape)}")
    return shape[0], shape[1]


def part_of(
    files: SafetensorsFiles, name: str, kinds: tuple[str, ...], shape: Shape | None = None
) -> Shape:
    """Shape of a tensor that a quantised layer must have; `shape` is what its others ask for."""
    found = shape_of(files, name)
    if files.kinds[name] not in kinds:
        raise ModelUnsupported(
            f"{name} of a quantised layer is stored as {files.kinds[name]}, and only "
            f"{', '.join(kinds)} is read; use another version of the checkpoint"
        )
    if shape is not None and found != shape:
        raise ModelUnsupported(
            f"{name} has shape {list(found)}, but the layer's other tensors and the "
            f"quantization_config ask for {list(shape)}"
        )
    return found


def shape_of(files: SafetensorsFiles, name: str) -> Shape:
    """Shape of a tensor that a quantised layer must have."""
    shape = files.shapes.get(name)
    if shape is None:
        raise ModelUnsupported(f"{name} of a quantised layer is missing from the checkpoint")
    return shape
