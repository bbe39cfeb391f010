"""Probes the machine: what loads and products reach at most, and how two threads meet.

Every probe takes many short tries. The best of them says what the machine can do, the median what
it gave just now: on a shared machine the two differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.platform.ops._native import has_kernels
from plait.platform.ops.huge_pages import huge_memory
from plait.platform.ops.probe import ARITHMETIC, barrier_ns, multiply_adds, read_words

_MEGABYTES = 192  # read by all threads together: beyond any cache that has no name of its own
_PIECE_WORDS = 2 << 20  # 16 MiB in a try: one or two milliseconds
_ROUNDS = 1 << 15  # of products in a try: half a millisecond
_MIN_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What many tries reached."""

    best: float
    median: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What so many threads reached together, 10⁹ a second."""

    num_threads: int
    read_gb_per_s: Reach
    gop_per_s: dict[str, Reach]  # by type; a multiply-add is two operations

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """Microseconds that two threads on two cores take to meet."""

    p50_us: float
    p99_us: float
    longest_us: float


def reached(cores: Sequence[int], *, seconds: float = 0.6, megabytes: int | None = None) -> Reached:
    """Probe `cores` at once, a thread on each; takes about `seconds` and `megabytes` of memory.

    Less memory than 192 MiB, which is the usual, may be read from a cache in part.
    """
    memory = huge_memory((megabytes or _MEGABYTES) << 20)  # as weights lie
    words = torch.arange(len(memory) // 8, out=memory.view(torch.int64))
    parts = [_InTurn(part) for part in words.chunk(len(cores))]
    share_s = seconds / (1 + len(ARITHMETIC))
    read = _rates(cores, share_s, lambda i: parts[i].read())
    operations: dict[str, Reach] = {}
    for kind in ARITHMETIC if has_kernels() else ():
        operations[kind] = _rates(cores, share_s, _products(kind))
    return Reached(num_threads=len(cores), read_gb_per_s=read, gop_per_s=operations)


def barrier(cores: Sequence[int], *, seconds: float = 0.3) -> Barrier | None:
    """How the first two of `cores` meet; None where there is one only, or no kernels."""
    if len(cores) < 2 or not has_kernels():
        return None
    found: list[list[float]] = []

    def probe() -> None:
        _stay_on(cores[0])
        found.append((barrier_ns(seconds, partner=cores[1]) / 1000).tolist())

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    samples = found[0]
    if not samples:
        return None
    p50_us, p99_us = np.percentile(samples, (50, 99)).tolist()
    return Barrier(p50_us=p50_us, p99_us=p99_us, longest_us=max(samples))


def _products(kind: str) -> Callable[[int], int]:
    return lambda _: 2 * multiply_adds(kind, _ROUNDS)


class _InTurn:
    """Reads a memory piece by piece, and from its start again."""

    def __init__(self, words: Tensor) -> None:
        self._pieces: tuple[Tensor, ...] = torch.split(words, _PIECE_WORDS)
        self._next = 0

    def read(self) -> int:
        """Read the next piece; returns its bytes."""
        piece = self._pieces[self._next]
        self._next = (self._next + 1) % len(self._pieces)
        read_words(piece)
        return 8 * len(piece)


def _rates(cores: Sequence[int], seconds: float, work: Callable[[int], int]) -> Reach:
    """What `work` reaches when all threads do it for `seconds`; rates of threads are added."""
    meet = threading.Barrier(len(cores))
    rates: list[list[float]] = [[] for _ in cores]

    def one(index: int) -> None:
        _stay_on(cores[index])
        work(index)  # first touches cost page faults and a slow clock
        meet.wait()
        now_s = time.perf_counter()
        end_s = now_s + seconds
        while now_s < end_s or len(rates[index]) < _MIN_TRIES:
            amount, start_s = work(index), now_s
            now_s = time.perf_counter()
            rates[index].append(amount / (now_s - start_s) / 1e9)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Reach(best=sum(map(max, rates)), median=float(sum(map(np.median, rates))))


def _stay_on(core: int) -> None:
    """Keep the calling thread there, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, [core])
