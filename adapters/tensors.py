"""The data of a checked safetensors file, read once into tensors of their own and hashed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256
from typing import BinaryIO

import torch
from torch import Tensor

from plait.adapters.files import WEIGHTS
from plait.adapters.header import SafetensorsHeader
from plait.platform.errors import AdapterFileChanged

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# The integer that a float's bits are read as, and the bits of its exponent.
_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}


def read_tensors(
    file: BinaryIO, raw_header: bytes, header: SafetensorsHeader
) -> tuple[dict[str, Tensor], str]:
    """All tensors of a file that stands at its data, and the SHA-256 of the whole file.

    Each tensor owns its memory, so that dropping one frees it.
    """
    digest = sha256(raw_header)
    tensors: dict[str, Tensor] = {}
    for entry in header.tensors:  # in the order of the file, without gaps
        tensor = torch.empty(math.prod(entry.shape), dtype=_DTYPES[entry.dtype])
        data = tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
        _fill(file, data)
        digest.update(data)
        tensors[entry.name] = tensor.view(entry.shape)
    return tensors, digest.hexdigest()


def _fill(file: BinaryIO, data: memoryview) -> None:
    while data:
        count = file.readinto(data)  # type: ignore[attr-defined]
        if not count:
            raise AdapterFileChanged(f"{WEIGHTS} became shorter while it was read")
        data = data[count:]


def not_finite(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of tensors with NaN or infinity in them."""
    return tuple(name for name, tensor in tensors.items() if not _is_finite(tensor))


def _is_finite(tensor: Tensor) -> bool:
    """Whether no value has all bits of its exponent set; quicker than torch on small tensors."""
    bits, exponent = _BITS[tensor.dtype]
    values = tensor.view(bits).numpy()
    return not bool(((values & exponent) == exponent).any())
