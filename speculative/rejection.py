"""Rejection sampling: verifies drafts that were drawn from a distribution of their own.

Leviathan, Kalman and Matias 2023 (arXiv 2211.17192): a draft `d` drawn from `q` is accepted with
the chance min(1, pi(d) / q(d)), and where it is not, the token is drawn from what `q` left of `pi`,
max(0, pi - q) made whole. The tokens are then distributed as `pi` would have drawn them. Unlike
sampled verify, the default, it does not give the *same* tokens as without drafts.

Two conditions lie with the caller. The drafts must have been drawn by the same sampler: their
noise, that of acceptance and that of the residual are salted apart, since a shared one would bias
the output. And whether a draft is verified must not depend on that draft, nor on any behind it: one
left out because its own token looked unlikely, or because a grammar forbids it, biases what is
drawn instead. To draw none behind an end token is no such thing: that looks at earlier drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.platform.logits.noise import Noise, stream_key
from plait.platform.ops.gumbel_argmax import gumbel_argmax

if TYPE_CHECKING:
    from plait.platform.core import Request

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Of noise for drafts, for acceptance and for residuals. The target's own noise has none.
_DRAFT, _ACCEPT, _RESIDUAL = 0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3
_ONE = np.array([0], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Probabilities of some tokens; all others have none."""

    ids: Ints  # ascending
    probs: Floats  # their sum is 1

    def of(self, token: int) -> float:
        """The probability of a token."""
        place = int(np.searchsorted(self.ids, token))
        is_in = place < len(self.ids) and self.ids[place] == token
        return float(self.probs[place]) if is_in else 0.0


def is_drawn(request: Request) -> bool:
    """Whether drafts of a model are drawn and rejected for a request; else they are coupled.

    Not where it is greedy: there is nothing to draw. Nor under a grammar: drafts are cut where it
    forbids them, and tokens vetoed once they are chosen, both by a look at the token itself.
    """
    return not request.params.greedy and request.grammar is None


class RejectionSampler:
    """Draws drafts and verifies them, for one sequence of one request.

    All noise is a function of (`seed`, `index`, position): no step and no row changes it. `noise`
    is of as many tokens as the vocabulary has.
    """

    def __init__(self, noise: Noise, seed: int, index: int) -> None:
        self._noise, self._seed, self._index = noise, seed, index

    def draw(self, q: Distribution, position: int) -> int:
        """A draft for `position`."""
        return self._draw(q.ids, q.probs, self._key(_DRAFT, position))

    def verify(
        self,
        pi: Iterable[Distribution],
        q: SequenceOf[Distribution],
        drafts: SequenceOf[int],
        position: int,
    ) -> tuple[int, ...]:
        """The tokens at `position`, `position` + 1, …: accepted drafts, and one token more.

        `pi` are the target's distributions before and behind each of the `drafts`, and taken only
        as far as drafts hold; `q` those that the drafts were drawn from.
        """
        targets = iter(pi)
        tokens: list[int] = []
        for i, (draft, source) in enumerate(zip(drafts, q, strict=True)):
            target = next(targets)
            accept_key = self._key(_ACCEPT, position + i)
            if self._uniform(accept_key) * source.of(draft) < target.of(draft):
                tokens.append(draft)
                continue
            left = _left(target, source)
            # Nothing left: both are equal but for rounding, and so is a draw from either.
            weights = left if left.any() else target.probs
            key = self._key(_RESIDUAL, position + i)
            return (*tokens, self._draw(target.ids, weights, key))
        target = next(targets)
        key = self._key(_RESIDUAL, position + len(drafts))
        return (*tokens, self._draw(target.ids, target.probs, key))

    def _key(self, salt: int, position: int) -> int:
        return stream_key(self._seed ^ salt, self._index, position)

    def _draw(self, ids: Ints, weights: Floats, key: int) -> int:
        possible = np.flatnonzero(weights > 0)
        ids, logits = ids[possible], np.log(weights[possible]).astype(np.float32)
        return int(ids[gumbel_argmax(self._noise, key, logits, 1.0, ids)])

    def _uniform(self, key: int) -> float:
        """Inside (0, 1)."""
        return (int(self._noise.bits(key, _ONE)[0] >> np.uint64(11)) + 0.5) * 2.0**-53


def _left(target: Distribution, source: Distribution) -> Floats:
    """What the source leaves of each of the target's probabilities."""
    places = np.minimum(np.searchsorted(target.ids, source.ids), len(target.ids) - 1)
    common = target.ids[places] == source.ids
    left = target.probs.copy()
    left[places[common]] -= source.probs[common]
    return np.maximum(left, 0.0)
