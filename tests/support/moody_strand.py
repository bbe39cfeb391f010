"""A strand for tests of the scheduler: slow and fickle, but true to its contract."""

from __future__ import annotations

import random
from collections.abc import Iterable

from plait.platform.core import Sequence, SequenceState
from plait.platform.errors import AdapterStorageFailed
from plait.platform.strand import Strand


class MoodyStrand(Strand):
    """A strand that is ready for a sequence after some steps, and refuses what it pleases.

    Readiness is lost when a sequence parks; one that could not run for another reason keeps it.
    """

    def __init__(
        self, rng: random.Random, *, longest_wait: int = 6, refusals: float = 0.05
    ) -> None:
        self._rng = rng
        self._longest_wait = longest_wait
        self._refusals = refusals
        self._waits: dict[int, int] = {}  # sequence → steps left
        self._held: set[int] = set()

    def begin(self, now_s: float) -> None:
        for seq_id in self._waits:
            self._waits[seq_id] = max(0, self._waits[seq_id] - self._rng.randrange(2))

    def admit(self, sequence: Sequence) -> bool:
        assert sequence.state is SequenceState.WAITING
        if sequence.seq_id in self._held:
            return True
        if sequence.seq_id not in self._waits:
            if self._rng.random() < self._refusals:
                raise AdapterStorageFailed("no")
            self._waits[sequence.seq_id] = self._rng.randrange(self._longest_wait + 1)
        if self._waits[sequence.seq_id]:
            return False
        del self._waits[sequence.seq_id]
        self._held.add(sequence.seq_id)
        return True

    def release(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.WAITING and sequence.seq_id in self._held:
            self._waits[sequence.seq_id] = 0
        elif sequence.state is not SequenceState.WAITING:
            self._waits.pop(sequence.seq_id, None)
        self._held.discard(sequence.seq_id)

    @property
    def busy(self) -> bool:
        return bool(self._waits)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        assert self._held == {sequence.seq_id for sequence in running}
