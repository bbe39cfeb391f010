"""GGUF's quantised blocks as codes, scales and minimums, without loss.

Every type here is affine: a value is `scale * code + minimum`, with both shared by 16 or 32
neighbours. Products of a block's factors (`d` in half precision times a scale of 4 to 8 bits) are
exact in fp32, so that what the codes stand for are the very numbers that llama.cpp expands to.
Layouts are those of ggml's ``block_q*`` structs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from plait.platform.ops.quantized_weight import Quantized

Array = np.ndarray
_Parts = tuple[Array, Array, Array]  # codes [blocks, values], scales and minimums [blocks, groups]
_Kind = GGMLQuantizationType

_BYTES_AT_ONCE = 1 << 22  # of a file; the work beside it stays in the cache


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one GGUF type is read."""

    bits: int  # of a code: 4, or 8 for what needs 5 to 8
    group: int  # values to a scale
    split: Callable[[Array], _Parts]


def read_blocks(data: Array, kind: GGMLQuantizationType, num_inputs: int) -> Quantized:
    """Rows of blocks, uint8 `[N, bytes of a row]`, as a weight `[N, num_inputs]`."""
    block = BLOCK_TYPES[kind]
    num_rows, row_bytes = data.shape
    num_groups = num_inputs // block.group
    codes = np.empty((num_rows, num_inputs), dtype=np.uint8)
    scales = np.empty((num_rows, num_groups), dtype=np.float32)
    mins = np.empty((num_rows, num_groups), dtype=np.float32)
    step = max(1, _BYTES_AT_ONCE // row_bytes)
    for start in range(0, num_rows, step):
        rows = data[start : start + step]
        parts = block.split(rows.reshape(-1, GGML_QUANT_SIZES[kind][1]))
        wholes: tuple[Array, Array, Array] = (codes, scales, mins)
        for whole, part in zip(wholes, parts, strict=True):
            whole[start : start + step] = part.reshape(len(rows), -1)
    return Quantized(
        codes=torch.from_numpy(codes),
        bits=block.bits,
        group=block.group,
        scales=torch.from_numpy(scales),
        mins=torch.from_numpy(mins),
    )


def _half(column: Array) -> Array:
    """Two bytes of each block as an fp32 number `[blocks, 1]`."""
    return np.ascontiguousarray(column).view(np.float16).astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """Low halves of the bytes, then their high halves: `[..., n]` to `[..., 2, n]`."""
    return np.stack([packed & 15, packed >> 4], axis=-2)


def _shifted(packed: Array, width: int, count: int) -> Array:
    """`count` fields of `width` bits: `[..., n]` to `[..., count, n]`, the lowest first."""
    shifts = np.arange(0, count * width, width, dtype=np.uint8)[:, None]
    fields: Array = (packed[..., None, :] >> shifts) & np.uint8(2**width - 1)
    return fields


def _fifth_bits(packed: Array) -> Array:
    """Bit i of four bytes as 16 or 0, `[blocks, 32]`."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Array) -> _Parts:
    d = _half(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), d, -8 * d


def _q4_1(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_0(blocks: Array) -> _Parts:
    d = _half(blocks[:, :2])
    low = _nibbles(blocks[:, 6:]).reshape(-1, 32)
    return low | _fifth_bits(blocks[:, 2:6]), d, -16 * d


def _q5_1(blocks: Array) -> _Parts:
    low = _nibbles(blocks[:, 8:]).reshape(-1, 32)
    codes = low | _fifth_bits(blocks[:, 4:8])
    return codes, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: Array) -> _Parts:
    d = _half(blocks[:, :2])
    return blocks[:, 2:] ^ np.uint8(128), d, -128 * d  # the sign bit turned over adds 128


def _q2_k(blocks: Array) -> _Parts:
    factors = blocks[:, :16]
    d, d_min = _half(blocks[:, 80:82]), _half(blocks[:, 82:84])
    codes = _shifted(blocks[:, 16:80].reshape(-1, 2, 32), 2, 4)
    return codes, d * (factors & 15), -d_min * (factors >> 4)


def _q3_k(blocks: Array) -> _Parts:
    high = _shifted(blocks[:, None, :32], 1, 8).reshape(-1, 2, 4, 32)
    low = _shifted(blocks[:, 32:96].reshape(-1, 2, 32), 2, 4)
    packed = blocks[:, 96:108]
    factors = _nibbles(packed[:, :8]) | _shifted(packed[:, 8:], 2, 4).reshape(-1, 2, 8) << 4
    scales = _half(blocks[:, 108:110]) * (factors.reshape(-1, 16).astype(np.float32) - 32)
    return low | high << 2, scales, -4 * scales


def _k_factors(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight minimums of six bits, in twelve bytes."""
    first, second, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, both & 15 | first >> 2 & 48], axis=1)
    mins = np.concatenate([second & 63, both >> 4 | second >> 2 & 48], axis=1)
    return scales, mins


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    factors, min_factors = _k_factors(blocks[:, 4:16])
    return _half(blocks[:, :2]) * factors, -_half(blocks[:, 2:4]) * min_factors


def _q4_k(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_k_scales(blocks)


def _q5_k(blocks: Array) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high = _shifted(blocks[:, 16:48], 1, 8)
    return low | high << 4, *_k_scales(blocks)


def _q6_k(blocks: Array) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = _shifted(blocks[:, 128:192].reshape(-1, 2, 32), 2, 4)
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    scales = _half(blocks[:, 208:210]) * factors
    return low | high << 4, scales, -32 * scales


BLOCK_TYPES = {
    _Kind.Q4_0: BlockType(4, 32, _q4_0),
    _Kind.Q4_1: BlockType(4, 32, _q4_1),
    _Kind.Q5_0: BlockType(8, 32, _q5_0),
    _Kind.Q5_1: BlockType(8, 32, _q5_1),
    _Kind.Q8_0: BlockType(8, 32, _q8_0),
    _Kind.Q2_K: BlockType(4, 16, _q2_k),
    _Kind.Q3_K: BlockType(4, 16, _q3_k),
    _Kind.Q4_K: BlockType(4, 32, _q4_k),
    _Kind.Q5_K: BlockType(8, 32, _q5_k),
    _Kind.Q6_K: BlockType(8, 16, _q6_k),
}
