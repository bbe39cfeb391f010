"""Gumbel noise that is a function of (seed, sequence index, position, token id) and nothing else.

A sample is the argmax of `logit / temperature + noise`. Because the noise has no state and knows
neither step nor row, a text depends on its logits and seed only: chunks, preemption, drafts and
the rest of the batch cannot change it. The generator is splitmix64 (Steele, Lea and Flood 2014):
each (seed, index, position) starts a stream of its own, in which token `v` is draw number `v`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]


def stream_key(seed: int, index: int, position: int) -> int:
    """64-bit key of the noise for one position: `position` is that of the token being chosen."""
    key = 0
    for word in (seed, index, position):
        key = _mix((key ^ word) + _GOLDEN)
    return key


def _mix(word: int) -> int:
    for shift, factor in _MIX:
        word &= _MASK
        word = (word ^ (word >> shift)) * factor
    word &= _MASK
    return word ^ (word >> _LAST_SHIFT)


class Noise:
    """The noise of every token of a vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._steps = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)

    def bits(self, key: int, ids: Ints | None) -> Bits:
        """64 uniform bits for each of `ids`, or for the whole vocabulary."""
        word = (self._steps if ids is None else self._steps[ids]) + np.uint64(key)
        for shift, factor in _MIX:
            word ^= word >> np.uint64(shift)
            word *= np.uint64(factor)
        word ^= word >> np.uint64(_LAST_SHIFT)
        return word

    def gumbel(self, key: int, ids: Ints | None = None) -> npt.NDArray[np.float64]:
        """Standard Gumbel noise, fp64, for each of `ids` or for the whole vocabulary."""
        return gumbel_of(self.bits(key, ids))


def gumbel_of(bits: Bits) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise made of uniform bits."""
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # inside (0, 1)
    return -np.log(-np.log1p(-uniform))
