"""Writes K and V of a step's rows into their slots of the pages."""

from __future__ import annotations

import functools

import torch

from plait.platform.config import KV_SCALE_BYTES
from plait.platform.ops._native import has_kernels
from plait.platform.ops.kv_codes import to_codes


def kv_write(
    pages: torch.Tensor,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Stores row t of `key` and `value` at slot `slot_mapping[t]` of the layer; negative: nowhere.

    Args:
        pages: [num_blocks, L, 2, Hkv, block_size, D], fp32 or bf16, contiguous; changed in place.
            Or int8 with D + 4 in the last place, see `kv_codes`.
        layer: Index within the group.
        key: [T, Hkv, ≤ D] of the pages' dtype, or beside int8 fp32 or bf16; heads and rows may lie
            apart, as in a merged qkv.
        value: Likewise; its head may be narrower than the key's. What is narrower than the pages'
            D is padded with zeros.
        slot_mapping: int64 [T], block * block_size + offset.

    Raises:
        RuntimeError: An argument does not fit; the message names it.
    """
    if pages.device.type == "cpu" and _use_kernel():
        torch.ops.plait.kv_write(pages, layer, key, value, slot_mapping)
    else:
        reference_kv_write(pages, layer, key, value, slot_mapping)


def reference_kv_write(
    pages: torch.Tensor,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`kv_write` by torch's indexing. Exact: there is no tolerance."""
    block_size, head_size = pages.shape[4:]
    is_codes = pages.dtype is torch.int8
    head_size -= KV_SCALE_BYTES if is_codes else 0
    wanted = slot_mapping >= 0
    slots = slot_mapping[wanted]
    for half, rows in enumerate((key, value)):
        padded = torch.nn.functional.pad(rows[wanted], (0, head_size - rows.shape[2]))
        padded = to_codes(padded) if is_codes else padded
        pages[slots // block_size, layer, half, :, slots % block_size] = padded


def example_kv_write(
    num_tokens: int,
    num_kv_heads: int,
    head_size: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random arguments of `kv_write`: scattered slots, K and V as views of a merged qkv."""
    num_blocks = num_tokens // block_size + 3
    pages = torch.randn(num_blocks, 2, 2, num_kv_heads, block_size, head_size).to(dtype)
    qkv = torch.randn(num_tokens, 3 * num_kv_heads * head_size).to(dtype)
    _, key, value = qkv.view(num_tokens, 3, num_kv_heads, head_size).unbind(1)
    slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
    return pages, 1, key, value, slots


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::kv_write", _fake)
    return True


def _fake(
    pages: torch.Tensor,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Changes nothing but `pages`, and returns nothing."""
