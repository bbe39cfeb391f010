"""Quantised weights: small codes with a scale and a minimum for each group of inputs.

`Quantized` is the plain form, into which files of every kind are read: GGUF blocks, GPTQ, AWQ and
compressed tensors fit it without loss. `pack_quantized` lays it out for the kernels, as
``csrc/quantized_weight.h`` tells, in one tensor of bytes that can be saved and mapped.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from plait.platform.ops.huge_pages import lasting_memory
from plait.platform.ops.tile_layout import STEP_INPUTS, TILE_OUTPUTS, TileLayout
from plait.platform.ops.two_level_scales import join_scales, split_scales

ROW_GROUP = 32  # inputs of a row that share a scale when rows are quantised, at most

Activations = Literal["exact", "int8"]
_GROUPS = (128, 64, 32, 16)  # that kernels know, beside one for all inputs
_MOST_ZERO_POINT = {4: 16, 8: 255}  # by bits; sums of 4-bit codes about it fit in int16


class Scales(enum.IntEnum):
    """How scales and minimums are stored."""

    FLOAT16 = 0
    FLOAT32 = 1
    TWO_LEVELS = 2  # whole numbers times factors of blocks, see two_level_scales.py


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """A weight [N, K]: `weight[n, k] = scales[n, k // group] * codes[n, k] + mins[n, k // group]`.

    Symmetric int8 weights q have codes q + 128 and mins -128 * scale.
    """

    codes: Tensor  # uint8 [N, K], below 2**bits
    bits: int  # 4 or 8
    group: int  # inputs to a scale: a multiple of 16, or K and more for one scale an output
    scales: Tensor  # fp32 [N, ceil(K / group)]
    mins: Tensor  # fp32, the same shape

    def unpack(self) -> Tensor:
        """Returns the weight in fp32, [N, K], every value rounded once."""
        return _dequantize(self.codes, self.scales, self.mins, self.group)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedQuantized:
    """A quantised weight as kernels read it. Made by `pack_quantized`.

    `blob` holds tiles of 16 outputs one after the other; the other fields describe them.
    """

    blob: Tensor  # uint8 [tiles * tile_bytes]
    out_features: int
    in_features: int
    bits: int
    group: int  # 16, 32, 64 or 128; 0 for one scale an output
    scales: Scales
    zero_point: int | None  # mins are -zero_point * scale and not stored; None: they are stored
    activations: Activations  # "exact": rows stay as they are; "int8": rows are quantised too

    @property
    def form(self) -> tuple[int, int, int, int, int, int]:
        """How kernels are told what `blob` holds."""
        zero_point = -1 if self.zero_point is None else self.zero_point
        sizes = (self.in_features, self.out_features)
        return (*sizes, self.bits, self.group, int(self.scales), zero_point)

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        return self.blob.numel()

    @property
    def num_tiles(self) -> int:
        """Tiles of 16 outputs; the last one may be padded."""
        return -(-self.out_features // TILE_OUTPUTS)

    @property
    def num_groups(self) -> int:
        """Groups of inputs, each with a scale for every output."""
        return -(-self.in_features // self.group) if self.group else 1

    @property
    def padded_inputs(self) -> int:
        """Inputs that codes are stored for; those beyond `in_features` are zeros."""
        group = self.group or ROW_GROUP
        return -(-self.in_features // group) * group

    @property
    def layout(self) -> TileLayout:
        """How its tiles lie in memory."""
        return TileLayout(
            inputs=self.padded_inputs,
            bits=self.bits,
            group=self.group,
            planes=2 if self.zero_point is None else 1,
            value_bytes=_DTYPES[self.scales].itemsize,
            has_factors=self.scales is Scales.TWO_LEVELS,
        )

    @property
    def tile_bytes(self) -> int:
        """What a tile takes."""
        return self.layout.tile_bytes

    def unpack(self) -> Tensor:
        """Returns the weight in fp32, [N, K], every value rounded once."""
        if self.out_features == 0:
            return torch.empty(0, self.in_features, device=self.blob.device)
        ids = torch.arange(self.out_features, device=self.blob.device)
        return torch.cat([self.rows(part) for part in ids.split(4096)])

    def rows(self, ids: Tensor) -> Tensor:
        """Returns outputs `ids` of the weight in fp32, [n, K]: rows of an embedding."""
        tile = ids // TILE_OUTPUTS
        lane = ids % TILE_OUTPUTS
        scales, mins = self._scales_of(tile, lane)
        return _dequantize(self._codes_of(tile, lane), scales, mins, self.group or self.in_features)

    def slice_outputs(self, start: int, stop: int) -> PackedQuantized:
        """Returns outputs start … stop - 1 as a weight that shares this one's memory.

        Raises:
            ValueError: The range is not inside the weight, or begins within a tile.
        """
        check_slice(start, stop, self.out_features)
        first, last = start // TILE_OUTPUTS, -(-stop // TILE_OUTPUTS)
        blob = self.blob[first * self.tile_bytes : last * self.tile_bytes]
        return replace(self, blob=blob, out_features=stop - start)

    def _codes_of(self, tile: Tensor, lane: Tensor) -> Tensor:
        units = self.layout.units(self.blob)
        lines = torch.cat([codes[tile, :, :, lane].flatten(1, 2) for _, codes in units], dim=1)
        if self.bits == 4:
            lines = torch.stack([lines & 15, lines >> 4], dim=2)
        return lines.flatten(1)[:, : self.in_features]

    def _scales_of(self, tile: Tensor, lane: Tensor) -> tuple[Tensor, Tensor]:
        start = self.layout.factor_bytes
        planes = self._planes(tile, lane, slice(start, None), _DTYPES[self.scales])
        if self.scales is Scales.TWO_LEVELS:
            factors = self._planes(tile, lane, slice(start), torch.float16)
            pairs = zip(factors, planes, strict=True)
            scales = [join_scales(factor, part, self.group) for factor, part in pairs]
        else:
            scales = [part.float() for part in planes]
        return scales[0], scales[0] * -self.zero_point if self.zero_point is not None else scales[1]

    def _planes(self, tile: Tensor, lane: Tensor, part: slice, dtype: torch.dtype) -> list[Tensor]:
        """Scales and minimums, or their factors: what a part of each header holds, [n, …] each."""
        layout = self.layout
        found = []
        for headers, _ in layout.units(self.blob):
            values = headers[..., part].view(dtype)
            values = values.unflatten(3, (-1, layout.planes, TILE_OUTPUTS))
            found.append(values[tile, :, :, :, :, lane].flatten(1, 3))
        whole = torch.cat(found, dim=1)
        count = layout.num_spans if part.start is None else self.num_groups
        return [whole[:, :count, plane] for plane in range(layout.planes)]


_DTYPES = {
    Scales.FLOAT16: torch.float16,
    Scales.FLOAT32: torch.float32,
    Scales.TWO_LEVELS: torch.int8,
}


def check_slice(start: int, stop: int, out_features: int) -> None:
    """Raises ValueError where outputs start … stop - 1 are no slice of whole tiles' outputs."""
    if not 0 <= start <= stop <= out_features:
        raise ValueError(
            f"linear: outputs {start} to {stop} are not inside a weight of {out_features}"
        )
    if start % TILE_OUTPUTS:
        raise ValueError(
            f"linear: a slice must begin at a multiple of {TILE_OUTPUTS}, not at {start}"
        )


def pack_quantized(weight: Quantized, *, activations: Activations) -> PackedQuantized:
    """Packs a weight without loss. The result shares no memory with it.

    Raises:
        ValueError: The parts do not fit each other, or the group is not one that kernels can read.
        TypeError: A part is of another dtype.
    """
    _check(weight, activations)
    group, scales, mins = _kernel_group(weight)
    zero_point = _zero_point(scales, mins, _MOST_ZERO_POINT[weight.bits])
    planes = [scales] if zero_point is not None else [scales, mins]
    kind, parts = _store_planes(planes, group)
    out_features, in_features = weight.codes.shape
    packed = PackedQuantized(
        blob=torch.empty(0, dtype=torch.uint8),
        out_features=out_features,
        in_features=in_features,
        bits=weight.bits,
        group=group,
        scales=kind,
        zero_point=zero_point,
        activations=activations,
    )
    blob = lasting_memory(packed.num_tiles * packed.tile_bytes)
    blob = blob.to(weight.codes.device).view(packed.num_tiles, packed.tile_bytes)
    for tiles in _parts(packed.num_tiles):
        rows = slice(tiles.start * TILE_OUTPUTS, tiles.stop * TILE_OUTPUTS)
        headers = _headers(packed.layout, [[plane[rows] for plane in part] for part in parts])
        lines = _lines(packed, weight.codes[rows])
        for to_headers, to_codes in packed.layout.units(blob[tiles]):
            count = to_headers.shape[1] * to_headers.shape[2]
            to_headers.copy_(headers[:, :count].unflatten(1, to_headers.shape[1:3]))
            headers = headers[:, count:]
            count = to_codes.shape[1] * to_codes.shape[2]
            to_codes.copy_(lines[:, :count].unflatten(1, to_codes.shape[1:3]))
            lines = lines[:, count:]
    return replace(packed, blob=blob.view(-1))


def quantize(weight: Tensor, *, bits: int, group: int) -> Quantized:
    """Rounds a weight [N, K] to codes: 8 bits evenly about zero, 4 bits from least to greatest.

    Args:
        weight: fp32 or bf16.
        bits: 4 or 8.
        group: Inputs to a scale, a multiple of 16; K or more for one scale an output.

    Raises:
        ValueError: The weight has values that are not finite, or bits or group do not fit.
    """
    if bits not in (4, 8) or group < 1:
        raise ValueError(f"quantize: {bits} bits in groups of {group} cannot be made")
    out_features, in_features = weight.shape
    group = min(group, in_features)
    padding = -in_features % group
    values = weight.detach().float()
    if not bool(values.isfinite().all()):
        raise ValueError("quantize: the weight has values that are not finite")
    padded = functional.pad(values, (0, padding)) if padding else values
    grouped = padded.view(out_features, -1, group)
    scales, mins = _range_of(grouped, values, bits)
    inverse = torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))
    codes = ((grouped - mins[..., None]) * inverse[..., None]).round_()
    codes = codes.clamp_(0, 2**bits - 1).to(torch.uint8)
    codes = codes.view(out_features, -1)[:, :in_features].contiguous()
    return Quantized(codes=codes, bits=bits, group=group, scales=scales, mins=mins)


def _range_of(grouped: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and minimums for weights [N, groups, group], each a value that fp16 holds if it can.

    The minimum always holds zero, so padded inputs do no harm.
    """
    limit = torch.finfo(torch.float16).max / 256
    is_small = float(values.abs().max()) < limit if values.numel() else True
    if bits == 8:
        scales = grouped.abs().amax(-1) / 127
        scales = _round_up_to_half(scales) if is_small else scales
        return scales, -128 * scales
    least = grouped.amin(-1).clamp_(max=0)
    mins = -_round_up_to_half(-least) if is_small else least
    scales = (grouped.amax(-1).clamp_(min=0) - mins) / 15
    return _round_up_to_half(scales) if is_small else scales, mins


def _round_up_to_half(values: Tensor) -> Tensor:
    """The nearest fp16 values that are not below, in fp32."""
    half = values.to(torch.float16)
    above = torch.nextafter(half, torch.full_like(half, torch.inf))
    return torch.where(half.float() < values, above, half).float()


def _check(weight: Quantized, activations: str) -> None:
    if activations not in ("exact", "int8"):
        raise ValueError(f"pack_quantized: activations must be exact or int8, not {activations}")
    if weight.bits not in (4, 8):
        raise ValueError(f"pack_quantized: codes must have 4 or 8 bits, not {weight.bits}")
    if weight.codes.dtype != torch.uint8:
        raise TypeError(f"pack_quantized: codes must be uint8, not {weight.codes.dtype}")
    if weight.codes.dim() != 2 or weight.codes.shape[1] == 0:
        raise ValueError(
            f"pack_quantized: codes must be [N, K] with K > 0, not {list(weight.codes.shape)}"
        )
    out_features, in_features = weight.codes.shape
    if weight.group < 1 or (weight.group < in_features and weight.group % 16):
        raise ValueError(f"pack_quantized: groups of {weight.group} are no multiple of 16")
    shape = (out_features, -(-in_features // weight.group))
    for name, part in (("scales", weight.scales), ("mins", weight.mins)):
        if part.dtype != torch.float32:
            raise TypeError(f"pack_quantized: {name} must be float32, not {part.dtype}")
        if part.shape != shape:
            raise ValueError(
                f"pack_quantized: {name} must be {list(shape)}, not {list(part.shape)}"
            )
    if weight.bits == 4 and weight.codes.numel() and int(weight.codes.max()) > 15:
        raise ValueError("pack_quantized: codes of 4 bits must be below 16")


def _kernel_group(weight: Quantized) -> tuple[int, Tensor, Tensor]:
    """The group for kernels, with scales and minimums repeated where theirs is smaller."""
    in_features = weight.codes.shape[1]
    if weight.group >= in_features:
        return 0, weight.scales, weight.mins
    group = next(size for size in _GROUPS if weight.group % size == 0)
    if group == weight.group:
        return group, weight.scales, weight.mins
    times, groups = weight.group // group, -(-in_features // group)
    scales = weight.scales.repeat_interleave(times, dim=1)[:, :groups]
    return group, scales, weight.mins.repeat_interleave(times, dim=1)[:, :groups]


def _zero_point(scales: Tensor, mins: Tensor, most: int) -> int | None:
    """The z for which every minimum is exactly -z * scale, if there is one in 0 … `most`."""
    places = scales.flatten().nonzero()
    if len(places) == 0:
        return 0 if not bool(mins.any()) else None
    first = int(places[0])
    ratio = -float(mins.flatten()[first]) / float(scales.flatten()[first])
    zero_point = round(ratio) if 0 <= ratio <= most else -1
    if zero_point < 0:
        return None
    return zero_point if torch.equal(scales.double() * -zero_point, mins.double()) else None


def _store_planes(planes: list[Tensor], group: int) -> tuple[Scales, list[list[Tensor]]]:
    """Chooses how to store scales and minimums; returns the parts of headers."""
    if all(map(_fits_half, planes)):
        return Scales.FLOAT16, [[plane.to(torch.float16) for plane in planes]]
    if group in (16, 32):
        split = [split_scales(plane, group) for plane in planes]
        found = [pair for pair in split if pair is not None]
        if len(found) == len(planes):
            return Scales.TWO_LEVELS, [list(part) for part in zip(*found, strict=True)]
    return Scales.FLOAT32, [planes]


def _fits_half(values: Tensor) -> bool:
    return torch.equal(values.to(torch.float16).float(), values)


def _parts(num_tiles: int, size: int = 256) -> Iterator[slice]:
    """Cuts tiles into parts, so that packing needs little memory beside the result."""
    for start in range(0, num_tiles, size):
        yield slice(start, min(start + size, num_tiles))


def _lines(packed: PackedQuantized, codes: Tensor) -> Tensor:
    """The lines of tiles' codes, [tiles, lines, 16, 4]."""
    num_rows, in_features = codes.shape
    padding = (0, packed.padded_inputs - in_features, 0, -num_rows % TILE_OUTPUTS)
    codes = functional.pad(codes, padding) if any(padding) else codes
    nibbles = 8 // packed.bits  # codes in a byte: of steps that follow each other
    steps = codes.unflatten(0, (-1, TILE_OUTPUTS)).unflatten(2, (-1, nibbles, STEP_INPUTS))
    steps = steps.transpose(1, 2)
    first: Tensor = steps[..., 0, :]
    return first | (steps[..., 1, :] << 4) if packed.bits == 4 else first


def _headers(layout: TileLayout, parts: list[list[Tensor]]) -> Tensor:
    """The headers of tiles, [tiles, spans, span_bytes], those without values too."""
    num_spans = layout.num_units * layout.unit_spans
    counts = [layout.span_groups] if len(parts) == 1 else [1, layout.span_groups]
    found = []
    for planes, count in zip(parts, counts, strict=True):
        values = torch.stack(planes, dim=-1)  # [N, n, planes]
        missing = num_spans * count - values.shape[1]
        values = functional.pad(values, (0, 0, 0, missing, 0, -len(values) % TILE_OUTPUTS))
        values = values.unflatten(0, (-1, TILE_OUTPUTS)).permute(0, 2, 3, 1).contiguous()
        found.append(values.view(torch.uint8).flatten(1).unflatten(1, (num_spans, -1)))
    return torch.cat(found, dim=2)


def _dequantize(codes: Tensor, scales: Tensor, mins: Tensor, group: int) -> Tensor:
    """`scales * codes + mins`, in fp64, where product and sum of such values are all but exact."""
    in_features = codes.shape[1]
    wide_scales = scales.double().repeat_interleave(group, dim=1)[:, :in_features]
    wide_mins = mins.double().repeat_interleave(group, dim=1)[:, :in_features]
    return (wide_scales * codes.double() + wide_mins).float()
