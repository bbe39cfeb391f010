"""A file of packed weights: written once, then read or mapped at each start.

    magic · length of the header · SHA-256 of the header, of the data · header (JSON) · data

The header names every value with its fields; tensors are ranges of the data, which begin at
multiples of 64 bytes. The file carries its own digests: what a crash left half-written, or anything
changed since, counts as absent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from plait.platform.model.experts import PackedExperts
from plait.platform.ops.huge_pages import huge_memory
from plait.platform.ops.linear import PackedWeight
from plait.platform.ops.quantized_weight import PackedQuantized, Scales

Kept = Tensor | PackedWeight | PackedQuantized | PackedExperts
_MAGIC = b"plaitw1\n"
_FRONT = struct.Struct("<8sQ32s32s")
_ALIGNMENT = 64
_PAGE = 4096
_TYPES: Mapping[str, type[Any]] = {
    "PackedWeight": PackedWeight,
    "PackedQuantized": PackedQuantized,
}
_BYTES_AT_ONCE = 1 << 24


class DamagedFile(Exception):
    """The file is not one that was written whole."""


def write_packed(file: BinaryIO, values: Iterable[tuple[str, Kept]]) -> None:
    """Write all values to an empty file."""
    writer = _Writer()
    described = [[name, writer.describe(value)] for name, value in values]
    header = json.dumps({"values": described, "num_bytes": writer.end}).encode()
    header_digest = hashlib.sha256(header).digest()
    file.write(_FRONT.pack(_MAGIC, len(header), header_digest, bytes(32)))
    file.write(header)
    start = _data_start(len(header))
    file.write(bytes(start - file.tell()))
    digest = hashlib.sha256()
    for at, tensor in writer.tensors:
        data: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        for piece in (bytes(start + at - file.tell()), memoryview(data)):
            digest.update(piece)
            file.write(piece)
    file.seek(0)
    file.write(_FRONT.pack(_MAGIC, len(header), header_digest, digest.digest()))


def _data_start(header_bytes: int) -> int:
    return -(-(_FRONT.size + header_bytes) // _PAGE) * _PAGE


class _Writer:
    """Gives tensors their places."""

    def __init__(self) -> None:
        self.tensors: list[tuple[int, Tensor]] = []
        self.end = 0

    def describe(self, value: Any) -> Any:
        """What the header says of a value."""
        if isinstance(value, Tensor):
            return self._place(value)
        if isinstance(value, PackedExperts):
            return {"experts": [self.describe(expert) for expert in value.experts]}
        fields = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            fields[field.name] = self._place(part) if isinstance(part, Tensor) else part
        return {"type": type(value).__name__, "fields": fields}

    def _place(self, tensor: Tensor) -> dict[str, Any]:
        at = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        self.end = at + tensor.nbytes
        self.tensors.append((at, tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"at": at, "dtype": dtype, "shape": list(tensor.shape)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedFile:
    """Values whose tensors are pages of a file, or one piece of memory."""

    values: Mapping[str, Kept]
    mapped_bytes: int  # 0: memory of their own


def open_packed(path: Path, *, verify: bool, copy: bool = False) -> PackedFile:
    """Map a file, or `copy` it to huge pages; `verify` reads it whole and compares its digest.

    Raises `OSError` where there is none, `DamagedFile` where it cannot be used.
    """
    with path.open("rb") as file:
        header, start, digest = _read_header(file)
        file.seek(0, 2)
        if file.tell() != start + header["num_bytes"]:
            raise DamagedFile(f"{path.name} has another length than it should")
        if verify and _digest_from(file, start) != digest:
            raise DamagedFile(f"{path.name} was changed")
        data = _read(file, start, header["num_bytes"]) if copy else _mapped(path)[start:]
    values = {name: _restore(described, data) for name, described in header["values"]}
    return PackedFile(values=values, mapped_bytes=0 if copy else header["num_bytes"])


def _read(file: BinaryIO, start: int, num_bytes: int) -> Tensor:
    data = huge_memory(num_bytes)
    file.seek(start)
    buffer: Any = data.numpy()
    left = memoryview(buffer)
    while left:
        count = file.readinto(left[:_BYTES_AT_ONCE])  # type: ignore[attr-defined]
        if not count:
            raise DamagedFile("the file became shorter")
        left = left[count:]
    return data


def _mapped(path: Path) -> Tensor:
    # Private: pages are shared with other processes for as long as nobody writes, and nobody does.
    mapped = np.memmap(path, mode="c", dtype=np.uint8)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped._mmap.madvise(mmap.MADV_WILLNEED)  # type: ignore[attr-defined]
    return torch.from_numpy(mapped.view(np.ndarray))


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int, bytes]:
    front = file.read(_FRONT.size)
    if len(front) < _FRONT.size:
        raise DamagedFile("the file is too short")
    magic, size, header_digest, digest = _FRONT.unpack(front)
    header = file.read(size) if magic == _MAGIC else b""
    if magic != _MAGIC or hashlib.sha256(header).digest() != header_digest:
        raise DamagedFile("the file's header is damaged")
    return json.loads(header), _data_start(size), digest


def _digest_from(file: BinaryIO, start: int) -> bytes:
    digest = hashlib.sha256()
    file.seek(start)
    while piece := file.read(_BYTES_AT_ONCE):
        digest.update(piece)
    return digest.digest()


def _restore(described: dict[str, Any], data: Tensor) -> Any:
    if "experts" in described:
        return PackedExperts(tuple(_restore(expert, data) for expert in described["experts"]))
    if "type" not in described:
        return _tensor(described, data)
    fields: dict[str, Any] = {
        name: _tensor(value, data) if isinstance(value, dict) else value
        for name, value in described["fields"].items()
    }
    kind = _TYPES[described["type"]]
    if kind is PackedQuantized:
        fields["scales"] = Scales(fields["scales"])
    return kind(**fields)


def _tensor(described: dict[str, Any], data: Tensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, described["dtype"])
    shape = torch.Size(described["shape"])
    at = described["at"]
    return data[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
