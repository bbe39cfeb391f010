"""How well proposed tokens hold, and so how many more of them are worth a row."""

from __future__ import annotations

import math

_PRIOR_HITS, _PRIOR_TRIALS = 3.0, 4.0
_TRIED = 8  # drafts, one by one, that are tried whatever the rest of the step costs
_DECAY = 31 / 32  # a trial counts half after 22 more
# A step costs as much before its first row as this many rows do: for SmolLM2 on one core, a step of
# one row takes 40 ms and each row more 6 ms.
_FIXED_ROWS = 6


class Acceptance:
    """Of one sequence: a decaying share of drafts that held, from a hopeful prior.

    Only drafts whose row was read count: what follows a wrong one, or an end, tells nothing.
    """

    def __init__(self) -> None:
        self._hits, self._trials = _PRIOR_HITS, _PRIOR_TRIALS
        self._drafts: tuple[int, ...] = ()
        self._num_seen = self._num_tried = 0
        self.num_drafted = self.num_accepted = 0

    def verifying(self, drafts: tuple[int, ...]) -> None:
        """A step is about to verify `drafts`; the tokens that it appends are `saw`."""
        self._drafts, self._num_seen = drafts, 0

    def saw(self, token: int) -> None:
        """A token came."""
        if self._num_seen >= len(self._drafts):
            return
        if not self._num_seen:
            self.num_drafted += len(self._drafts)
        hit = token == self._drafts[self._num_seen]
        self._num_seen = self._num_seen + 1 if hit else len(self._drafts)
        self.num_accepted += hit
        self._num_tried += 1
        self._hits = self._hits * _DECAY + hit
        self._trials = self._trials * _DECAY + 1

    def worthwhile(self, num_rows: int) -> int:
        """How many drafts at once pay beside the `num_rows` that a step computes anyway.

        A row pays if its token comes with a better chance than its share of the step's time. So
        alone nearly any draft does, and in a full batch only what is all but certain.
        """
        least = num_rows / (num_rows + _FIXED_ROWS)
        share = min(0.99, self._hits / self._trials)
        fewest = 1 if self._num_tried < _TRIED else 0
        return max(fewest, int(math.log(least) / math.log(share)))
