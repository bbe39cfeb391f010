"""The header of a safetensors file, checked before any of its data is touched.

Format: 8 bytes little-endian length, a JSON object of that length, then the data. Each tensor
names its dtype, shape and bytes; together they cover the data without holes or overlaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # the dtypes that adapters are written in

_MAX_TENSORS = 200_000
_MAX_DIMENSIONS = 8
_MAX_NAME = 1024


class HeaderError(ValueError):
    """What is wrong with a header."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes `start:stop` of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """All tensors, in the order of their data."""

    tensors: tuple[TensorEntry, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return self.tensors[-1].stop if self.tensors else 0


def header_size(first_bytes: bytes, file_bytes: int, limit: int) -> int:
    """The header's length in bytes, from the file's first eight."""
    if len(first_bytes) < 8:
        raise HeaderError("the file is too short to hold a header")
    length = int.from_bytes(first_bytes, "little")
    if length > limit:
        raise HeaderError(f"the header claims {length:,} bytes; at most {limit:,} are read")
    if length > file_bytes - 8:
        raise HeaderError("the file ends inside its header: it is truncated, or no safetensors")
    return length


def parse_header(content: Any, data_bytes: int) -> SafetensorsHeader:
    """Check a header that was parsed as JSON against the size of the data behind it."""
    if not isinstance(content, dict):
        raise HeaderError("the header is not an object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("__metadata__ maps names to text")
    if len(content) > _MAX_TENSORS:
        raise HeaderError(f"{len(content):,} tensors; at most {_MAX_TENSORS:,} are read")
    entries = sorted(
        (_entry(name, fields) for name, fields in content.items()),
        key=lambda entry: (entry.start, entry.stop, entry.name),
    )
    _check_layout(entries, data_bytes)
    return SafetensorsHeader(tuple(entries))


def _entry(name: str, fields: Any) -> TensorEntry:
    shown = repr(name[:200])
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise HeaderError(f"{shown} is no name for a tensor")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{shown} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise HeaderError(f"{shown} has dtype {dtype!r:.40}; adapters are F32, F16 or BF16")
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise HeaderError(f"{shown} has the shape {shape!r:.80}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise HeaderError(f"{shown} has the data_offsets {offsets!r:.80}")
    start, stop = offsets
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise HeaderError(f"{shown} has {stop - start} bytes of data, unlike its shape and dtype")
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 62 for v in values
    )


def _check_layout(entries: list[TensorEntry], data_bytes: int) -> None:
    end = 0
    for entry in entries:
        if entry.start < end:
            raise HeaderError(f"{entry.name[:200]!r} overlaps another tensor")
        if entry.start > end:
            raise HeaderError(f"{entry.start - end} bytes before {entry.name[:200]!r} are no one's")
        end = entry.stop
    if end != data_bytes:
        raise HeaderError(f"the tensors take {end:,} bytes, and {data_bytes:,} follow the header")
