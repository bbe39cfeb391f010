"""Rows of packed weights as they were, for an embedding that shares its weight with the head."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from plait.platform.ops._native import has_kernels
from plait.platform.ops.linear import PackedWeight
from plait.platform.ops.quantized_weight import PackedQuantized
from plait.platform.ops.tile_layout import TILE_OUTPUTS


def packed_rows(packed: PackedWeight | PackedQuantized, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns outputs `ids` of the weight, [n, K].

    Args:
        packed: A weight [N, K].
        ids: int64 [n], each one of N.
        dtype: fp32 or bf16; quantised weights are rounded to fp32 and then to it.

    Raises:
        RuntimeError: An id is not one of N.
    """
    ids = ids.contiguous()
    if ids.device.type != "cpu" or not _use_kernels():
        return reference_packed_rows(packed, ids, dtype)
    if isinstance(packed, PackedWeight):
        sizes = (packed.in_features, packed.out_features)
        rows: Tensor = torch.ops.plait.packed_rows.default(packed.tiles, ids, *sizes)
        return rows.to(dtype)
    found: Tensor = torch.ops.plait.quantized_rows.default(packed.blob, ids, *packed.form, dtype)
    return found


def reference_packed_rows(
    packed: PackedWeight | PackedQuantized, ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """`packed_rows` by torch. Exact: the kernel gives the same bits."""
    if isinstance(packed, PackedQuantized):
        return packed.rows(ids).to(dtype)
    num_tiles, steps, _ = packed.tiles.shape
    tiles = packed.tiles.view(num_tiles, steps, TILE_OUTPUTS, -1)
    rows = tiles[ids // TILE_OUTPUTS, :, ids % TILE_OUTPUTS].flatten(1)
    return rows[:, : packed.in_features].to(dtype)


@functools.cache
def _use_kernels() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::packed_rows", _fake_packed)
    torch.library.register_fake("plait::quantized_rows", _fake_quantized)
    return True


def _fake_packed(packed: Tensor, ids: Tensor, in_features: int, out_features: int) -> Tensor:
    del out_features
    return packed.new_empty((len(ids), in_features))


def _fake_quantized(blob: Tensor, ids: Tensor, in_features: int, *rest: Any) -> Tensor:
    return blob.new_empty((len(ids), in_features), dtype=rest[-1])
