"""The KV page tensors: one per group, sized by the cache's configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.platform.config import KV_SCALE_BYTES

if TYPE_CHECKING:
    from plait.platform.config import CacheConfig, KVGroup

_ALIGNMENT = 64  # bytes: a cache line and the widest vector
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def page_shape(group: KVGroup, block_size: int, dtype: str) -> tuple[int, ...]:
    """Returns [num_blocks, L, 2, Hkv, block_size, D]: K and V of all layers of a block together.

    A block is one piece of memory, so that it can be copied, spilled and restored in one transfer.
    In int8 the last dimension is D + 4: codes, then their scale.
    """
    return (
        group.num_blocks,
        len(group.layers),
        2,
        group.num_kv_heads,
        block_size,
        group.head_size + (KV_SCALE_BYTES if dtype == "int8" else 0),
    )


def create_pages(cache: CacheConfig, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Returns the page tensors of all groups, zeroed, in the order of `cache.groups`."""
    dtype = torch.int8 if cache.dtype == "int8" else DTYPES[cache.dtype]
    return [
        _zeros(page_shape(group, cache.block_size, cache.dtype), dtype, torch.device(device))
        for group in cache.groups
    ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory only where they are written, on a CPU.

    `torch.zeros` writes every byte: 14 GB of pages cost seconds at start, and all of their memory
    before the first request. The system's own zero pages cost nothing until they are used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).view(shape)
