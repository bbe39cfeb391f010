"""The KV page tensors: one per group, sized by the cache's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from plait.platform.config import CacheConfig, KVGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def page_shape(group: KVGroup, block_size: int) -> tuple[int, ...]:
    """Returns [num_blocks, L, 2, Hkv, block_size, D]: K and V of all layers of a block together.

    A block is one piece of memory, so that it can be copied, spilled and restored in one transfer.
    """
    return (
        group.num_blocks,
        len(group.layers),
        2,
        group.num_kv_heads,
        block_size,
        group.head_size,
    )


def create_pages(cache: CacheConfig, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Returns the page tensors of all groups, zeroed, in the order of `cache.groups`."""
    return [
        torch.zeros(page_shape(group, cache.block_size), dtype=DTYPES[cache.dtype], device=device)
        for group in cache.groups
    ]
