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
# Above this many candidates the noise is first bounded in fp32, then made exact for the few that
# can win: 0.27 instead of 0.68 ms for 49,152 tokens. Below, exact at once is faster.
_DIRECT = 2048
# Far above the rounding of the fp32 bound (< 1e-4 where a token can still win).
_SLACK = 0.01

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]


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
        return _gumbel(self.bits(key, ids))

    def argmax(self, key: int, logits: Floats, temperature: float, ids: Ints | None = None) -> int:
        """Index into `logits` of the largest `logits / temperature + noise`, in fp64.

        `logits`: [N] fp32, no NaN, the largest finite; `ids`: token of each, None where N is the
        whole vocabulary. Equal scores, which do not happen: the lowest index.
        """
        bits = self.bits(key, ids)
        top = logits.max()
        if len(logits) <= _DIRECT:
            return int(_score(logits, top, temperature, bits).argmax())
        # Gumbel noise is -log(-log(1 - u)) <= -log(u), and nearly equal where it is large.
        bound = np.log((bits >> np.uint64(11)).view(np.int64).astype(np.float32) + np.float32(0.5))
        scaled = (logits - top) * np.float32(1 / temperature)
        np.subtract(scaled, bound, out=bound)  # short of the constant 53 log 2
        first = slice(int(bound.argmax()), None)
        reached = _score(logits[first][:1], top, temperature, bits[first][:1])[0]
        few = np.flatnonzero(bound >= np.float32(reached - 53 * np.log(2) - _SLACK))
        return int(few[_score(logits[few], top, temperature, bits[few]).argmax()])


def _gumbel(bits: Bits) -> npt.NDArray[np.float64]:
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # inside (0, 1)
    return -np.log(-np.log1p(-uniform))


def _score(
    logits: Floats, top: np.float32, temperature: float, bits: Bits
) -> npt.NDArray[np.float64]:
    scores: npt.NDArray[np.float64] = (logits.astype(np.float64) - np.float64(top)) / temperature
    return scores + _gumbel(bits)
