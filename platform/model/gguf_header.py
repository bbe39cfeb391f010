"""The tensor table of a GGUF file: names, shapes, types and places of its tensors."""

from __future__ import annotations

import functools
import math
import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from plait.platform.errors import ModelUnsupported
from plait.platform.text.gguf_metadata import GgufReader

_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor: `shape` as torch has it, bytes `start:end` of the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and tensor table; checked against the file's size."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """As GGUF names it."""
        return str(self.metadata.get("general.architecture"))


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises `ModelUnsupported` where the file is no GGUF file, damaged or truncated.
    """
    facts = path.stat()
    return _read_header(path, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=2)  # three parts of loading want it, and a vocabulary takes a while
def _read_header(path: Path, size: int, mtime_ns: int) -> GgufHeader:
    del mtime_ns  # a file that was written anew is read anew
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _HeaderReader(data).header()
    except struct.error as error:
        raise ModelUnsupported(f"{path.name} is truncated: it ends within its header") from error
    except (ValueError, IndexError, KeyError) as error:
        raise ModelUnsupported(f"{path.name} is no readable GGUF file: {error}") from error
    end = max((tensor.end for tensor in header.tensors), default=0)
    if end > size:
        raise ModelUnsupported(
            f"{path.name} is truncated: its tensors end at byte {end}, the file at {size}"
        )
    _check_places(path, header.tensors)
    return header


def _check_places(path: Path, tensors: tuple[GgufTensor, ...]) -> None:
    """Every tensor has a name and bytes of its own."""
    in_order = sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))
    for one, other in pairwise(in_order):
        if other.start < one.end:
            raise ModelUnsupported(
                f"{path.name} is damaged: its tensors {one.name} and {other.name} overlap"
            )
    by_name = sorted(tensor.name for tensor in tensors)
    for name in (one for one, other in pairwise(by_name) if one == other):
        raise ModelUnsupported(f"{path.name} is damaged: it has two tensors named {name}")


class _HeaderReader(GgufReader):
    def header(self) -> GgufHeader:
        metadata = self.metadata()
        (num_tensors,) = struct.unpack_from("<Q", self._data, 8)
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        for name, _, _, offset in entries:
            if offset % alignment:
                raise ValueError(f"{name} begins at {offset}, no multiple of {alignment}")
        data_start = -(-self._at // alignment) * alignment
        tensors = tuple(
            GgufTensor(
                name=name,
                shape=shape,
                kind=kind,
                start=data_start + offset,
                end=data_start + offset + _num_bytes(shape, kind),
            )
            for name, shape, kind, offset in entries
        )
        return GgufHeader(metadata=metadata, tensors=tensors)

    def _entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        sizes = [self._unpack("Q") for _ in range(self._unpack("I"))]
        kind, offset = GGMLQuantizationType(self._unpack("I")), self._unpack("Q")
        if not sizes or sizes[0] % GGML_QUANT_SIZES[kind][0]:
            raise ValueError(f"{name} of shape {sizes[::-1]} is not whole {kind.name} blocks")
        return name, tuple(reversed(sizes)), kind, offset  # stored fastest first


def _num_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block_values * block_bytes
