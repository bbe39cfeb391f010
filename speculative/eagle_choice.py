"""The next token of a draft from one row of the head's logits, as the target would choose it.

The head has tokens of its own, a part of the target's: rows are widened to those of the sequence,
so that masks and the target's choice see what they know.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from plait.speculative.choice import MIN_TEMPERATURE

if TYPE_CHECKING:
    import numpy.typing as npt

    from plait.platform.core import Sequence
    from plait.speculative.choice import Choose, Floats, Mask


class HeadChoice:
    """Chooses by `choose` and `mask`; keeps which token of the target each of the head's is.

    `mask` may be missing as long as nobody asks for drafts of a sequence with a grammar.
    """

    def __init__(
        self,
        target_ids: npt.NDArray[np.int64],
        vocab_size: int,
        *,
        choose: Choose,
        mask: Mask | None,
    ) -> None:
        """`target_ids`: of the head's tokens, in their order; `vocab_size` is the target's."""
        self._ids = target_ids
        self.vocab_size = vocab_size
        self._places = np.zeros(vocab_size, np.int64)  # of its tokens in its rows
        self._places[target_ids] = np.arange(len(target_ids))
        self._choose = choose
        self._mask = mask

    def can_obey(self, sequence: Sequence) -> bool:
        """Whether what a sequence's grammar forbids is known here."""
        return self._mask is not None or sequence.request.grammar is None

    def target_id(self, place: int) -> int:
        """The target's number of a token of the head."""
        return int(self._ids[place])

    def next(
        self, sequence: Sequence, drafts: tuple[int, ...], logits: Floats
    ) -> tuple[int, float] | None:
        """The token behind a sequence and drafts, and the head's chance of it; None: there is none.

        `logits` are of the head's tokens.
        """
        row = self._widen(logits, sequence.request.vocab_size or self.vocab_size)
        masked = sequence.request.grammar is not None
        if masked:
            if self._mask is None or not self._mask(sequence, drafts, row):
                return None
            logits = row[self._ids].copy()
        temperature = sequence.request.params.temperature
        total = _log_sum(logits, temperature)
        if total is None:  # what the grammar allows is not among the head's tokens
            return None
        token = self._choose(sequence, drafts, row, masked=masked)
        if token is None:
            return None
        return token, _chance(float(logits[self._places[token]]), total, temperature)

    def _widen(self, logits: Floats, width: int) -> Floats:
        """A row of the sequence's vocabulary: tokens that the head lacks cannot be had."""
        row = np.full(width, -np.inf, np.float32)
        row[self._ids] = logits
        return row


def _log_sum(logits: Floats, temperature: float) -> float | None:
    """Logarithm of the sum of a row's exponentials; None where the row has no token."""
    scores = logits / max(temperature, MIN_TEMPERATURE) if temperature > 0 else logits
    largest = float(scores.max())
    if not math.isfinite(largest):
        return None
    return largest + math.log(float(np.exp(scores - largest).sum()))


def _chance(score: float, total: float, temperature: float) -> float:
    """The head's own probability of a token, from its logit."""
    if temperature > 0:
        score /= max(temperature, MIN_TEMPERATURE)
    return math.exp(score - total)
