"""An adapter's low-rank weights as kernels read them: one buffer, nothing padded.

``csrc/lora.h`` has the layout. What `lora_` does with them stands in ``lora.py``.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.platform.ops.huge_pages import WORTH_IT, huge_memory

TILE = 16
SLACK = 64  # bytes after the last value: kernels read whole vectors
LEAF_FIELDS = 5  # of a leaf in a table: offset of a, inputs, sum of ranks, first part, parts
PART_FIELDS = 8  # of a part: offset of b, start, outputs, rank, b_bias, g, bias, scale
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_MOST_CODE = 127
# Steps read the same piece of many adapters, one after the other, and fetch some ahead. A cache
# holds few lines whose addresses are the same in the last 16 bits, as they would be where every
# adapter begins a huge page. Shifted by parts of that, those of a few neighbours lie far apart.
# What 32 of rank 16 add to a step is then 12.3 ms instead of 12.8.
_CACHE_WAY = 64 << 10
_SHIFT = 633 * 64  # lines; by the golden ratio
_MADE = itertools.count()
# By their bytes: adapters of one shape share a table. A step that reads 32 at every leaf then finds
# it in cache.
_TABLES: weakref.WeakValueDictionary[bytes, Tensor] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraPart:
    """A change of outputs start … start + N - 1 of a leaf.

    Plain: y + c · scale · (b a x + b_bias), with c the request's own scale. With g (DoRA):
    g · (y - bias + c · scale · (b a x + b_bias)) + bias.
    """

    a: Tensor  # [r, K]; of an embedding, K is the vocabulary
    b: Tensor  # [N, r]
    scale: float
    start: int = 0
    b_bias: Tensor | None = None  # [N]
    g: Tensor | None = None  # [N]
    bias: Tensor | None = None  # [N], the base's, which g does not scale

    @property
    def rank(self) -> int:
        """Columns of b."""
        return self.b.shape[1]

    @property
    def out_features(self) -> int:
        """How many outputs it changes."""
        return self.b.shape[0]

    def vectors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What is kept in fp32, in the order of the layout."""
        return self.b_bias, self.g, self.bias


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedLora:
    """An adapter's weights as the kernels read them. Made by `pack_lora`."""

    buffer: Tensor  # uint8
    table: Tensor  # int64, leaves and then parts; offsets are bytes in the buffer. Shared
    num_leaves: int
    dtype: torch.dtype
    changed: int  # bit i: leaf i is changed

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, tables aside."""
        return self.buffer.numel()

    def changes(self, leaf: int) -> bool:
        """Tells whether there are parts at the leaf."""
        return bool(self.changed >> leaf & 1)

    def unpack(self, leaf: int) -> list[LoraPart]:
        """Returns the parts at a leaf, in the dtype of the packed ones.

        Of int8: a's codes, and b with all scales, in fp64, where their products are exact.
        """
        at, inputs, ranks, first, count = self._fields(leaf * LEAF_FIELDS, LEAF_FIELDS)
        has_codes = self.dtype is torch.int8
        factors = self.buffer[at : at + ranks * 4].view(torch.float32) if has_codes else None
        a = self._matrix(at + ranks * 4 * has_codes, ranks, inputs) if count else None
        parts = []
        rank_start = 0
        for index in range(first, first + count):
            start_field = self.num_leaves * LEAF_FIELDS + index * PART_FIELDS
            at, start, outputs, rank, *vectors, scale = self._fields(start_field, PART_FIELDS)
            b_bias, g, bias = (self._vector(offset, outputs) for offset in vectors)
            assert a is not None
            part_a = a[rank_start : rank_start + rank]
            b = self._matrix(at, outputs, rank)
            if factors is not None:
                b = b.double() * factors[rank_start : rank_start + rank].double()
                part_a = part_a.double()
            rank_start += rank
            part = LoraPart(
                a=part_a, b=b, scale=float_of(scale), start=start, b_bias=b_bias, g=g, bias=bias
            )
            parts.append(part)
        return parts

    def _fields(self, start: int, count: int) -> list[int]:
        fields: list[int] = self.table[start : start + count].tolist()
        return fields

    def _matrix(self, at: int, rows: int, columns: int) -> Tensor:
        width = _stored_columns(columns, self.dtype)
        values = self.buffer[at : at + rows * width * self.dtype.itemsize].view(self.dtype)
        matrix = values.new_empty(rows, width)
        for stored, part in _blocks(values, matrix):
            part.copy_(stored)
        return matrix[:, :columns]

    def _vector(self, at: int, size: int) -> Tensor | None:
        return None if at < 0 else self.buffer[at : at + size * 4].view(torch.float32)


def lora_bytes(parts_by_leaf: Mapping[int, Sequence[LoraPart]], dtype: torch.dtype) -> int:
    """Returns what `pack_lora` would allocate. Shapes suffice: tensors may be on torch's "meta".

    Raises:
        TypeError, ValueError: As `pack_lora`.
    """
    return _Layout(parts_by_leaf, dtype).num_bytes


def pack_lora(
    parts_by_leaf: Mapping[int, Sequence[LoraPart]],
    num_leaves: int,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
) -> PlacedLora:
    """Packs an adapter, its weights rounded to `dtype`. The result shares no memory with it.

    Args:
        parts_by_leaf: What it changes; leaves that are not named are not changed.
        num_leaves: Of the model.
        dtype: fp32, bf16, or int8: codes with a scale for each row of a and column of b.
        device: Of the packed weights.

    Raises:
        TypeError: The dtype is another one.
        ValueError: A part's shapes do not fit each other, or a leaf is not one of the model's.
    """
    layout = _Layout(parts_by_leaf, dtype)
    if any(not 0 <= leaf < num_leaves for leaf in layout.leaves):
        raise ValueError(f"lora: leaves must be in 0 to {num_leaves - 1}")
    buffer = _memory(layout.num_bytes).to(device)
    table = [0] * (num_leaves * LEAF_FIELDS)
    part_table: list[int] = []
    changed = 0
    with torch.no_grad():
        for leaf, (fields, parts) in layout.leaves.items():
            changed |= 1 << leaf
            table[leaf * LEAF_FIELDS : (leaf + 1) * LEAF_FIELDS] = fields
            a = parts[0].part.a if len(parts) == 1 else torch.cat([p.part.a for p in parts])
            pieces = [placed.part.b for placed in parts]
            at = fields[0]
            if dtype is torch.int8:
                a, pieces, factors = _codes(a, pieces)
                buffer[at : at + factors.numel() * 4].view(torch.float32).copy_(factors)
                at += factors.numel() * 4
            _store_matrix(a, buffer, at, dtype)
            for placed, b in zip(parts, pieces, strict=True):
                placed.store(b, buffer, dtype)
                part_table.extend(placed.fields())
    return PlacedLora(
        buffer=buffer,
        table=_shared_table(table + part_table),
        num_leaves=num_leaves,
        dtype=dtype,
        changed=changed,
    )


def example_lora(
    parts_by_leaf: Mapping[int, Sequence[tuple[int, int, int, str]]],
    in_features: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> PlacedLora:
    """A random adapter: leaf → (start, outputs, rank, kind), kind "plain", "bias" or "dora"."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def part(start: int, outputs: int, rank: int, kind: str) -> LoraPart:
        return LoraPart(
            a=random(rank, in_features) / in_features**0.5,
            b=random(outputs, rank),
            scale=0.5 + rank % 3,
            start=start,
            b_bias=random(outputs) if kind == "bias" else None,
            g=1 + 0.1 * random(outputs) if kind == "dora" else None,
            bias=random(outputs) if kind == "dora" and start % 2 == 0 else None,
        )

    parts = {leaf: [part(*shape) for shape in shapes] for leaf, shapes in parts_by_leaf.items()}
    return pack_lora(parts, max(parts, default=0) + 1, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedPart:
    part: LoraPart
    at: int
    vectors_at: tuple[int, ...]  # -1: none

    def fields(self) -> list[int]:
        part = self.part
        shape = [self.at, part.start, part.out_features, part.rank]
        return [*shape, *self.vectors_at, float_bits(part.scale)]

    def store(self, b: Tensor, buffer: Tensor, dtype: torch.dtype) -> None:
        _store_matrix(b, buffer, self.at, dtype)
        for at, vector in zip(self.vectors_at, self.part.vectors(), strict=True):
            if vector is not None:
                buffer[at : at + vector.numel() * 4].view(torch.float32).copy_(vector)


class _Layout:
    """Where everything of an adapter lies in its buffer: leaf by leaf, as steps read it."""

    def __init__(self, parts_by_leaf: Mapping[int, Sequence[LoraPart]], dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise TypeError(f"lora: weights must be float32, bfloat16 or int8, not {dtype}")
        self.leaves: dict[int, tuple[list[int], list[_PlacedPart]]] = {}
        self._end = 0
        num_parts = 0
        for leaf, parts in sorted(parts_by_leaf.items()):
            if not parts:
                continue
            _check_leaf(leaf, parts)
            inputs = parts[0].a.shape[1]
            ranks = sum(part.rank for part in parts)
            num_bytes = ranks * _stored_columns(inputs, dtype) * dtype.itemsize
            num_bytes += ranks * 4 if dtype is torch.int8 else 0  # factors
            fields = [self._take(num_bytes), inputs, ranks, num_parts]
            placed = [self._place(part, dtype) for part in parts]
            self.leaves[leaf] = ([*fields, len(parts)], placed)
            num_parts += len(parts)
        self.num_bytes = self._end + SLACK

    def _take(self, num_bytes: int) -> int:
        at = -(-self._end // 4) * 4  # fp32 values are aligned
        self._end = at + num_bytes
        return at

    def _place(self, part: LoraPart, dtype: torch.dtype) -> _PlacedPart:
        columns = _stored_columns(part.rank, dtype)
        at = self._take(part.out_features * columns * dtype.itemsize)
        vectors = [-1 if v is None else self._take(v.numel() * 4) for v in part.vectors()]
        return _PlacedPart(part=part, at=at, vectors_at=tuple(vectors))


def _shared_table(values: list[int]) -> Tensor:
    made = np.array(values, np.int64)
    return _TABLES.setdefault(made.tobytes(), torch.from_numpy(made))


def _check_leaf(leaf: int, parts: Sequence[LoraPart]) -> None:
    for part in parts:
        a, b = part.a, part.b
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.numel():
            raise ValueError(
                f"lora: a must be [r, K] and b [N, r], not {list(a.shape)} and {list(b.shape)}, "
                f"at leaf {leaf}"
            )
        if a.shape[1] != parts[0].a.shape[1]:
            raise ValueError(f"lora: parts of leaf {leaf} take different inputs")
        if any(v is not None and v.shape != (part.out_features,) for v in part.vectors()):
            raise ValueError(f"lora: b_bias, g and bias must be [{b.shape[0]}] at leaf {leaf}")
        if part.start < 0 or (part.bias is not None and part.g is None):
            raise ValueError(f"lora: a negative start, or a bias without g, at leaf {leaf}")


def _codes(a: Tensor, bs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Make codes of a and of each part's b; last, what rows of a and columns of b are scaled by."""
    a_codes, a_scales = _rows_to_codes(a)
    made = [_rows_to_codes(b.T) for b in bs]
    b_scales = torch.cat([scales for _, scales in made])
    return a_codes, [codes.T for codes, _ in made], a_scales * b_scales


def _rows_to_codes(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values = matrix.float()
    most = values.abs().amax(dim=1, keepdim=True)
    codes = (values * (_MOST_CODE / most.clamp(min=torch.finfo(torch.float32).tiny))).round()
    return codes.clamp(-_MOST_CODE, _MOST_CODE).to(torch.int8), (most / _MOST_CODE).squeeze(1)


def _stored_columns(columns: int, dtype: torch.dtype) -> int:
    """Codes come in pairs: an odd number of columns has one more, of zeros."""
    return columns + columns % 2 if dtype is torch.int8 else columns


def _store_matrix(matrix: Tensor, buffer: Tensor, at: int, dtype: torch.dtype) -> None:
    missing = _stored_columns(matrix.shape[1], dtype) - matrix.shape[1]
    if missing:
        matrix = torch.nn.functional.pad(matrix, (0, missing))
    values = buffer[at : at + matrix.numel() * dtype.itemsize].view(dtype)
    for stored, part in _blocks(values, matrix):
        stored.copy_(part)


def _blocks(values: Tensor, matrix: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of packed values, and of the same values in [rows, columns], of one shape.

    Tiles are of 16 rows, the last one narrower: [tile][column][row]. In bf16, columns lie in pairs,
    [tile][pair][row][2], and the last one of an odd number alone.
    """
    rows, columns = matrix.shape
    together = 1 if values.dtype is torch.float32 else 2
    paired = columns // together * together
    full = rows // TILE * TILE
    for first, count, width in ((0, full // TILE, TILE), (full, 1, rows - full)):
        if not count * width:
            continue
        end = first + count * width
        tiles = values[first * columns : end * columns].view(count, columns * width)
        part = matrix[first:end].unflatten(0, (count, width))
        pairs = tiles[:, : paired * width].view(count, paired // together, width, together)
        yield pairs, part[..., :paired].unflatten(2, (-1, together)).transpose(1, 2)
        if paired < columns:
            yield tiles[:, paired * width :], part[..., -1]


def _memory(num_bytes: int) -> Tensor:
    """Zeros, in huge pages: steps that read many adapters would spend a fifth on addresses, else.

    numpy asks for them too, and takes no more than is needed; torch does not ask.
    """
    if num_bytes < WORTH_IT:
        return torch.from_numpy(np.zeros(num_bytes, np.uint8))
    return huge_memory(num_bytes, next(_MADE) * _SHIFT % _CACHE_WAY)


def float_bits(value: float) -> int:
    """Returns the bits of a double as an integer, for a table."""
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def float_of(bits: int) -> float:
    """Returns the double of these bits."""
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value
