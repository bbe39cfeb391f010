"""Rejection sampling: verifies drafts that were drawn from a distribution of their own.

Leviathan, Kalman and Matias 2023 (arXiv 2211.17192): a draft `d` drawn from `q` is accepted with
the chance min(1, pi(d) / q(d)), and where it is not, the token is drawn from what `q` left of `pi`,
max(0, pi - q) made whole. The tokens are then distributed as `pi` would have drawn them. Unlike
sampled verify, the default, it does not give the *same* tokens as without drafts.

Two conditions lie with the caller. The drafts must have been drawn by the same sampler: their
noise, that of acceptance and that of the residual are salted apart, since a shared one would bias
the output. And how many drafts are verified must not depend on which tokens were drawn: a draft
left out because its own token looked unlikely, or because a grammar forbids it, biases what is
drawn instead. Mask `q` before the draw, and decide on lengths by what was known before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from plait.platform.noise import Noise, stream_key

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]

# Of noise for drafts, for acceptance and for residuals. The target's own noise has none.
_DRAFT, _ACCEPT, _RESIDUAL = 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3
_ONE = np.array([0], dtype=np.int64)


class RejectionSampler:
    """Draws drafts and verifies them, for one sequence of one request.

    All noise is a function of (`seed`, `index`, position): no step and no row changes it. `noise`
    is of as many tokens as the rows have.
    """

    def __init__(self, noise: Noise, seed: int, index: int) -> None:
        self._noise, self._seed, self._index = noise, seed, index

    def draw(self, q: Floats, position: int) -> int:
        """A draft for `position`, from probabilities `q` [V]."""
        return self._draw(q, self._key(_DRAFT, position))

    def verify(self, pi: Floats, q: Floats, drafts: Ints, position: int) -> tuple[int, ...]:
        """The tokens at `position`, `position` + 1, …: accepted drafts, and one token more.

        `pi` [K + 1, V] are the target's probabilities before and behind each of the K `drafts`,
        `q` [K, V] those that the drafts were drawn from. Rows sum to 1.
        """
        tokens: list[int] = []
        for i, draft in enumerate(drafts.tolist()):
            target, source = pi[i].astype(np.float64), q[i].astype(np.float64)
            accept_key = self._key(_ACCEPT, position + i)
            if self._uniform(accept_key) * source[draft] < target[draft]:
                tokens.append(draft)
                continue
            left = np.maximum(target - source, 0.0)
            # Nothing left: both are equal but for rounding, and so is a draw from either.
            rest = left if left.any() else target
            return (*tokens, self._draw(rest, self._key(_RESIDUAL, position + i)))
        key = self._key(_RESIDUAL, position + len(drafts))
        return (*tokens, self._draw(pi[len(drafts)], key))

    def _key(self, salt: int, position: int) -> int:
        return stream_key(self._seed ^ salt, self._index, position)

    def _draw(self, weights: Floats, key: int) -> int:
        ids = np.flatnonzero(weights > 0)
        return int(ids[np.argmax(np.log(weights[ids]) + self._noise.gumbel(key, ids))])

    def _uniform(self, key: int) -> float:
        """Inside (0, 1)."""
        return (int(self._noise.bits(key, _ONE)[0] >> np.uint64(11)) + 0.5) * 2.0**-53
