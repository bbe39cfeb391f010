"""Low-rank updates of linear layers: many adapters in one step, each on its own rows, in place.

A *leaf* is one linear layer as the model runs it, perhaps merged (q, k, v; gate, up) or an
embedding. What an adapter changes there are *parts*: ΔW = scale · b · a over a range of the leaf's
outputs. The a of all parts lie together, so that one pass over x serves q, k and v. An adapter is
packed once, without padding its ranks, and read from front to back; ``csrc/lora.h`` has the layout.

The work is that of the rows that have adapters, each at its own ranks. Rows without are not
touched. A row's numbers depend on that row and its adapters alone.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.platform.ops._native import has_kernels

TILE = 16
_SLACK = 64  # bytes after the last value: kernels read whole vectors
_LEAF_FIELDS = 5  # of a leaf in a table: offset of a, inputs, sum of ranks, first part, parts
_PART_FIELDS = 8  # of a part: offset of b, start, outputs, rank, b_bias, g, bias, scale
_UNIT = 2.0**-24  # what rounding to fp32 changes at most, of a value
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


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
    table: Tensor  # int64, leaves and then parts; offsets are bytes in the buffer
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
        """Returns the parts at a leaf, in the dtype of the packed ones."""
        at, inputs, ranks, first, count = self._fields(leaf * _LEAF_FIELDS, _LEAF_FIELDS)
        a = self._matrix(at, ranks, inputs) if count else None
        parts = []
        rank_start = 0
        for index in range(first, first + count):
            start_field = self.num_leaves * _LEAF_FIELDS + index * _PART_FIELDS
            at, start, outputs, rank, *vectors, scale = self._fields(start_field, _PART_FIELDS)
            b_bias, g, bias = (self._vector(offset, outputs) for offset in vectors)
            assert a is not None
            part_a = a[rank_start : rank_start + rank]
            b = self._matrix(at, outputs, rank)
            rank_start += rank
            part = LoraPart(
                a=part_a, b=b, scale=_float(scale), start=start, b_bias=b_bias, g=g, bias=bias
            )
            parts.append(part)
        return parts

    def _fields(self, start: int, count: int) -> list[int]:
        fields: list[int] = self.table[start : start + count].tolist()
        return fields

    def _matrix(self, at: int, rows: int, columns: int) -> Tensor:
        size = rows * columns * self.dtype.itemsize
        values = self.buffer[at : at + size].view(self.dtype)
        full = rows // TILE * TILE
        tiles = values[: full * columns].view(full // TILE, columns, TILE).transpose(1, 2)
        rest = values[full * columns :].view(columns, rows - full).T
        return torch.cat([tiles.reshape(full, columns), rest])

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
        dtype: fp32 or bf16.
        device: Of the packed weights.

    Raises:
        TypeError: The dtype is another one.
        ValueError: A part's shapes do not fit each other, or a leaf is not one of the model's.
    """
    layout = _Layout(parts_by_leaf, dtype)
    if any(not 0 <= leaf < num_leaves for leaf in layout.leaves):
        raise ValueError(f"lora: leaves must be in 0 to {num_leaves - 1}")
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    table = [0] * (num_leaves * _LEAF_FIELDS)
    part_table: list[int] = []
    changed = 0
    with torch.no_grad():
        for leaf, (fields, parts) in layout.leaves.items():
            changed |= 1 << leaf
            table[leaf * _LEAF_FIELDS : (leaf + 1) * _LEAF_FIELDS] = fields
            a = parts[0].part.a if len(parts) == 1 else torch.cat([p.part.a for p in parts])
            _store_matrix(a, buffer, fields[0], dtype)
            for placed in parts:
                placed.store(buffer, dtype)
                part_table.extend(placed.fields())
    return PlacedLora(
        buffer=buffer,
        table=torch.tensor(table + part_table, dtype=torch.int64),
        num_leaves=num_leaves,
        dtype=dtype,
        changed=changed,
    )


class LoraSegments:
    """Which rows of a step have which adapters. Built once a step, for all its leaves.

    Segments are (start, end, adapter, scale): rows start … end - 1 of the step. A row may be in
    several, whose changes are then applied in the order of the list. Adapters are kept alive.
    """

    __slots__ = ("_changed", "entries", "num_rows", "table")

    def __init__(self, segments: Iterable[tuple[int, int, PlacedLora, float]]) -> None:
        self.entries = tuple(segment for segment in segments if segment[0] != segment[1])
        if any(start < 0 or end < start for start, end, _, _ in self.entries):
            raise ValueError("lora: a segment must begin at 0 or later, and end after it begins")
        self.num_rows = max((end for _, end, _, _ in self.entries), default=0)
        self._changed = 0
        for _, _, placed, _ in self.entries:
            self._changed |= placed.changed
        rows = [
            _segment_fields(start, end, placed, scale)
            for start, end, (placed, scale) in _disjoint(self.entries)
        ]
        self.table = torch.tensor(rows, dtype=torch.int64).view(-1, 8)  # see csrc/lora.h

    def __bool__(self) -> bool:
        """Tells whether there are any."""
        return bool(self.entries)

    def changes(self, leaf: int) -> bool:
        """Tells whether any of the adapters changes the leaf."""
        return bool(self._changed >> leaf & 1)


def lora_(out: Tensor, x: Tensor, segments: LoraSegments, leaf: int) -> None:
    """Adds the segments' changes to a leaf's outputs, rounding once for each segment.

    Args:
        out: [T, N], fp32 or bf16, what the base computed; changed in place. Rows may lie apart.
        x: [T, K], fp32 or bf16, the leaf's input. Rows may lie apart.
        segments: Of this step.
        leaf: As in `pack_lora`.

    Raises:
        ValueError, RuntimeError: Rows, inputs or outputs do not fit.
    """
    if not segments.changes(leaf):
        return
    if out.device.type == "cpu" and _use_kernel():
        torch.ops.plait.lora_(out, x, segments.table, leaf)
    else:
        reference_lora_(out, x, segments, leaf)


def lora_embedding_(out: Tensor, token_ids: Tensor, segments: LoraSegments, leaf: int) -> None:
    """As `lora_` for an embedding: its input is the one-hot row of each token.

    Args:
        out: [T, H], fp32 or bf16; changed in place.
        token_ids: int64 [T]; those of rows in segments that change the leaf are ids of its
            vocabulary.
        segments: Of this step.
        leaf: As in `pack_lora`, with a [r, V].

    Raises:
        ValueError, RuntimeError: Rows, ids or outputs do not fit.
    """
    if not segments.changes(leaf):
        return
    if out.device.type == "cpu" and _use_kernel():
        torch.ops.plait.lora_embedding_(out, token_ids, segments.table, leaf)
    else:
        reference_lora_embedding_(out, token_ids, segments, leaf)


def reference_lora_(out: Tensor, x: Tensor, segments: LoraSegments, leaf: int) -> None:
    """`lora_` by torch's own products in fp32: right, but slow, and not the same in every batch."""
    _check_rows(out, x, segments)
    for start, end, placed, scale in segments.entries:
        rows = x[start:end].float()
        parts = placed.unpack(leaf)
        _check_parts(parts, out, x.shape[1])
        _apply(out[start:end], [rows @ part.a.float().T for part in parts], parts, scale)


def reference_lora_embedding_(
    out: Tensor, token_ids: Tensor, segments: LoraSegments, leaf: int
) -> None:
    """`lora_embedding_` by torch's own gather and products in fp32."""
    _check_rows(out, token_ids, segments)
    for start, end, placed, scale in segments.entries:
        parts = placed.unpack(leaf)
        _check_parts(parts, out, None)
        ids = token_ids[start:end]
        for part in parts:
            if bool(((ids < 0) | (ids >= part.a.shape[1])).any()):
                raise ValueError(f"lora: a token is not one of the {part.a.shape[1]}")
        _apply(out[start:end], [part.a.T[ids].float() for part in parts], parts, scale)


def _apply(
    out: Tensor, shrunk: Sequence[Tensor], parts: Sequence[LoraPart], request_scale: float
) -> None:
    for t, part in zip(shrunk, parts, strict=True):
        change = t @ part.b.float().T
        if part.b_bias is not None:
            change += part.b_bias
        change *= request_scale * part.scale
        y = out[:, part.start : part.start + part.out_features]
        if part.g is None:
            y.copy_(y.float() + change)
        else:
            bias = 0.0 if part.bias is None else part.bias
            y.copy_(part.g * (y.float() - bias + change) + bias)


def exact_lora(out: Tensor, x: Tensor, segments: LoraSegments, leaf: int) -> tuple[Tensor, Tensor]:
    """Returns what `lora_` makes of `out` in fp64, and how far from it each value may lie.

    A chain of n additions in fp32 errs by at most n · 2⁻²⁴ of the sum of its terms' sizes: t has
    four chains of K / 4 and two additions of their sums, b · t one of r, over values of t that err
    already. Scaling and adding round a few times more, and each segment rounds to out's dtype.
    """
    exact, bound = out.double(), torch.zeros_like(out, dtype=torch.float64)
    half_unit = 2.0**-8 if out.dtype is torch.bfloat16 else _UNIT
    for start, end, placed, scale in segments.entries:
        rows = x[start:end].double()
        for part in placed.unpack(leaf):
            columns = slice(part.start, part.start + part.out_features)
            y, y_error = exact[start:end, columns], bound[start:end, columns]
            change, error = _exact_change(rows, part, scale * part.scale)
            bias = torch.zeros(1) if part.bias is None else part.bias
            g = torch.ones(1) if part.g is None else part.g
            bias, g = bias.double(), g.double()
            error += y_error + 3 * _UNIT * (y.abs() + bias.abs() + change.abs())
            scaled = g * (y - bias + change)
            y.copy_(scaled + bias)
            error = g.abs() * error + 2 * _UNIT * (scaled.abs() + bias.abs())
            y_error.copy_(error + half_unit * (y.abs() + error) + 2.0**-126)
    return exact, bound


def _exact_change(rows: Tensor, part: LoraPart, scale: float) -> tuple[Tensor, Tensor]:
    a, b = part.a.double(), part.b.double()
    t, sizes = rows @ a.T, rows.abs() @ a.abs().T
    t_error = (a.shape[1] / 4 + 4) * _UNIT * sizes
    change, sizes = t @ b.T, t.abs() @ b.abs().T
    error = t_error @ b.abs().T + (part.rank + 2) * _UNIT * (sizes + t_error @ b.abs().T)
    if part.b_bias is not None:
        change += part.b_bias
        error += 2 * _UNIT * (change.abs() + part.b_bias.abs())
    return change * scale, error * abs(scale) + 4 * _UNIT * (change * scale).abs()


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


def _check_rows(out: Tensor, x: Tensor, segments: LoraSegments) -> None:
    if x.shape[0] != out.shape[0]:
        raise ValueError(f"lora: out has {out.shape[0]} rows, the input {x.shape[0]}")
    if segments.num_rows > out.shape[0]:
        raise ValueError(f"lora: out has {out.shape[0]} rows, segments {segments.num_rows}")


def _check_parts(parts: Sequence[LoraPart], out: Tensor, inputs: int | None) -> None:
    for part in parts:
        if inputs is not None and part.a.shape[1] != inputs:
            raise ValueError(f"lora: x has {inputs} columns, the adapter takes {part.a.shape[1]}")
        if part.start + part.out_features > out.shape[1]:
            raise ValueError(
                f"lora: outputs {part.start} to {part.start + part.out_features} are not inside "
                f"the leaf's {out.shape[1]}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedPart:
    part: LoraPart
    at: int
    vectors_at: tuple[int, ...]  # -1: none

    def fields(self) -> list[int]:
        part = self.part
        shape = [self.at, part.start, part.out_features, part.rank]
        return [*shape, *self.vectors_at, _bits(part.scale)]

    def store(self, buffer: Tensor, dtype: torch.dtype) -> None:
        _store_matrix(self.part.b, buffer, self.at, dtype)
        for at, vector in zip(self.vectors_at, self.part.vectors(), strict=True):
            if vector is not None:
                buffer[at : at + vector.numel() * 4].view(torch.float32).copy_(vector)


class _Layout:
    """Where everything of an adapter lies in its buffer: leaf by leaf, as steps read it."""

    def __init__(self, parts_by_leaf: Mapping[int, Sequence[LoraPart]], dtype: torch.dtype) -> None:
        if dtype not in _DTYPES:
            raise TypeError(f"lora: weights must be float32 or bfloat16, not {dtype}")
        self.leaves: dict[int, tuple[list[int], list[_PlacedPart]]] = {}
        self._end = 0
        num_parts = 0
        for leaf, parts in sorted(parts_by_leaf.items()):
            if not parts:
                continue
            _check_leaf(leaf, parts)
            inputs = parts[0].a.shape[1]
            ranks = sum(part.rank for part in parts)
            fields = [self._take(ranks * inputs * dtype.itemsize), inputs, ranks, num_parts]
            placed = [self._place(part, dtype) for part in parts]
            self.leaves[leaf] = ([*fields, len(parts)], placed)
            num_parts += len(parts)
        self.num_bytes = self._end + _SLACK

    def _take(self, num_bytes: int) -> int:
        at = -(-self._end // 4) * 4  # fp32 values are aligned
        self._end = at + num_bytes
        return at

    def _place(self, part: LoraPart, dtype: torch.dtype) -> _PlacedPart:
        at = self._take(part.b.numel() * dtype.itemsize)
        vectors = [-1 if v is None else self._take(v.numel() * 4) for v in part.vectors()]
        return _PlacedPart(part=part, at=at, vectors_at=tuple(vectors))


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


def _store_matrix(matrix: Tensor, buffer: Tensor, at: int, dtype: torch.dtype) -> None:
    """Stores [rows, columns] in tiles of 16 rows, the last one narrower: [tile][column][row]."""
    rows, columns = matrix.shape
    values = buffer[at : at + rows * columns * dtype.itemsize].view(dtype)
    full = rows // TILE * TILE
    if full:
        tiles = matrix[:full].unflatten(0, (-1, TILE)).transpose(1, 2)
        values[: full * columns].view(-1, columns, TILE).copy_(tiles)
    if full < rows:
        values[full * columns :].view(columns, rows - full).copy_(matrix[full:].T)


def _disjoint(
    entries: Sequence[tuple[int, int, PlacedLora, float]],
) -> list[tuple[int, int, tuple[PlacedLora, float]]]:
    """Cuts segments so that any two are the same rows or share none, in the order of rows."""
    in_order = all(a[1] <= b[0] for a, b in itertools.pairwise(entries))
    if in_order:
        return [(start, end, (placed, scale)) for start, end, placed, scale in entries]
    cuts = sorted({cut for start, end, _, _ in entries for cut in (start, end)})
    return [
        (low, high, (placed, scale))
        for low, high in itertools.pairwise(cuts)
        for start, end, placed, scale in entries
        if start <= low and high <= end
    ]


def _segment_fields(start: int, end: int, placed: PlacedLora, scale: float) -> list[int]:
    weights, table = placed.buffer.data_ptr(), placed.table.data_ptr()
    size = placed.table.numel()
    dtype = _DTYPES[placed.dtype]
    return [start, end, weights, table, placed.num_leaves, size, dtype, _bits(scale)]


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _float(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return value


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels() or not hasattr(torch.ops.plait, "lora_"):
        return False
    torch.library.register_fake("plait::lora_", _fake)
    torch.library.register_fake("plait::lora_embedding_", _fake)
    return True


def _fake(out: Tensor, x: Tensor, segments: Tensor, leaf: int) -> None:
    """Changes nothing but `out`, and returns nothing."""
