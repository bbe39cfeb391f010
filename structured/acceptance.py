"""How well proposed tokens hold, and so how many more of them are worth a row."""

from __future__ import annotations

import math

_PRIOR_HITS, _PRIOR_TRIALS = 15.0, 16.0
_DECAY = 63 / 64  # a trial counts half after 44 more
_LEAST = 0.7  # under this share a draft is worth no row
_WORTH = 0.5  # the last draft of a run holds with at least this chance


class Acceptance:
    """Of one sequence: a decaying share of drafts that held, from a prior that trusts them.

    Only drafts whose row was read count: what follows a wrong one, or an end, tells nothing. Under
    a least share nothing is proposed any more, so that a grammar whose text the model spells
    otherwise costs its first few drafts.
    """

    def __init__(self) -> None:
        self._hits, self._trials = _PRIOR_HITS, _PRIOR_TRIALS
        self._drafts: tuple[int, ...] = ()
        self._num_seen = 0
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
        self._hits = self._hits * _DECAY + hit
        self._trials = self._trials * _DECAY + 1

    @property
    def worthwhile(self) -> int:
        """How many drafts at once are likely enough to hold; 0: none any more."""
        share = self._hits / self._trials
        if share < _LEAST:
            return 0
        if share >= 1:
            return 1 << 10
        return int(math.log(_WORTH) / math.log(share))
