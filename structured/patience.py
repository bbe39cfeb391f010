"""How long one sequence's grammar may keep the others of its batch waiting.

Grammars have been tried before they come here (`trial.py`), on short texts. One that grows dearer
with its text, or in a place that no trial has seen, shows here by what it takes, and then its own
request ends, not the patience of all others.
"""

from __future__ import annotations

from plait.platform.errors import GrammarTooComplex

# Real schemas take a tenth of it. Beside steps of 20 ms others hardly notice.
ALLOWED_S = 0.003  # of processor time for each token
MOST_S = 0.3  # beyond what is allowed: once, in a place that is dear, or little by little


class Patience:
    """What a sequence's grammar has taken beyond what it is allowed."""

    __slots__ = ("_beyond_s",)

    def __init__(self) -> None:
        self._beyond_s = 0.0

    def token(self) -> None:
        """A token has come, and with it what is allowed for it."""
        self._beyond_s = max(0.0, self._beyond_s - ALLOWED_S)

    def take(self, seconds: float) -> None:
        """Count processor time. Raises `GrammarTooComplex` where it has become too much."""
        self._beyond_s += seconds
        if self._beyond_s > MOST_S:
            raise GrammarTooComplex(
                f"the grammar takes too long: on this text {self._beyond_s:.2f} s of processor "
                f"time beyond {1e3 * ALLOWED_S:g} ms for each token, {MOST_S:g} s are the limit. "
                "Simplify it: counts around alternatives or around other counts, and rules that "
                "read the same text in many ways, are what costs"
            )
