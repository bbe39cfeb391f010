"""Memory for weights in pages of two megabytes.

A step reads every weight once. In pages of four kilobytes it looks up the address of each of them,
which on virtual machines takes two walks: on one, a core read 14 GB/s so, and 20 GB/s from huge
pages. Systems give huge pages to memory that asks for them and belongs to nobody's file.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
WORTH_IT = 8 << 20  # bytes: what is less would lie in parts of pages


def huge_memory(num_bytes: int) -> Tensor:
    """Bytes `[num_bytes]`, zero, of this process alone, in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE") or num_bytes < WORTH_IT:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]
