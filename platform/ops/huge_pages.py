"""Memory for weights in pages of two megabytes.

A step reads every weight once. In pages of four kilobytes it looks up the address of each of them,
which on virtual machines takes two walks: on one, a core read 14 GB/s so, and 20 GB/s from huge
pages. Systems give huge pages to memory that asks for them and belongs to nobody's file.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_LINE = 64
WORTH_IT = 8 << 20  # bytes: what is less would lie in parts of pages


_CHUNK = 16 << 20
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


def huge_memory(num_bytes: int, shift: int = 0) -> Tensor:
    """Bytes `[num_bytes]`, zero, of this process alone, in huge pages where the system has them.

    There, the first byte lies `shift` bytes behind the beginning of a page.
    """
    if not _HAS_HUGE_PAGES or num_bytes < WORTH_IT:
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory, start = _map(num_bytes + shift)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=start + shift)


def lasting_memory(num_bytes: int) -> Tensor:
    """The same for what lives as long as others made beside it: small ones share huge pages.

    These are given back once none of those that share them is left.
    """
    if not _HAS_HUGE_PAGES or not 0 < num_bytes < WORTH_IT:
        return huge_memory(num_bytes)
    return _chunks.take(num_bytes)


class _Chunks:
    """Pieces of memory that is mapped some huge pages at a time, each handed out once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._at = 0
        self._end = 0

    def take(self, num_bytes: int) -> Tensor:
        """Bytes at the next line of a cache."""
        with self._lock:
            if self._memory is None or self._at + num_bytes > self._end:
                self._memory, self._at = _map(_CHUNK)
                self._end = self._at + _CHUNK
            start = self._at
            self._at = -(-(start + num_bytes) // _LINE) * _LINE
            return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)


_chunks = _Chunks()


def _map(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Memory of huge pages, and where in it the first one begins."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
