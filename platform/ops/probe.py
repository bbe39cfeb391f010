"""What the processor can do at most, beside which every kernel's rate is judged.

The ops do the work and say what they did; whoever calls them holds the clock. Python's other
threads run meanwhile, so that several can read at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.platform.ops._native import has_kernels

ARITHMETIC = ("float32", "bfloat16", "int8")
MAX_ROUNDS = 1 << 22


def read_words(words: Tensor) -> int:
    """Read all of `words` (int64, dense) and return the xor of them."""
    if has_kernels():
        return int(torch.ops.plait.probe_read(words))
    return reference_read_words(words)


def reference_read_words(words: Tensor) -> int:
    """`read_words` by torch: it folds halves upon each other."""
    words = words.flatten()
    result = torch.zeros((), dtype=torch.int64)
    while len(words) > 1:
        if len(words) % 2:
            result = result ^ words[-1]
        half = len(words) // 2
        words = words[:half] ^ words[half : 2 * half]
    return int(result ^ words[0]) if len(words) else 0


def multiply_adds(kind: str, rounds: int) -> int:
    """Multiply in registers of one thread, `rounds` times a few dozen to hundreds of values.

    Args:
        kind: One of `ARITHMETIC`, as the kernels of the instruction set in use multiply it.
        rounds: At most `MAX_ROUNDS`.

    Returns:
        How many multiply-adds were done: the sum of as many products of ones.

    Raises:
        RuntimeError: The kernels are not built, the type is unknown, or rounds are too many.
    """
    if not has_kernels():
        raise RuntimeError("plait::probe_dot needs the C++ kernels: `make build`")
    return int(torch.ops.plait.probe_dot(kind, rounds))


def barrier_ns(seconds: float, *, partner: int = -1, size: int = 65536) -> Tensor:
    """Nanoseconds of rounds of a barrier between this thread and one on core `partner`.

    Args:
        seconds: How long to try, at most 10.
        partner: The other thread's core; -1: any.
        size: Most rounds.

    Returns:
        int64 [rounds], in the order in which they were.
    """
    samples = torch.zeros(size, dtype=torch.int64)
    if not has_kernels():
        return samples[:0]
    count = int(torch.ops.plait.probe_barrier_(samples, seconds, partner))
    return samples[:count]
