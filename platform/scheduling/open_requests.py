"""The requests that have not ended: their sequences, their deadlines, who was never admitted."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

from plait.platform.core import SequenceState

if TYPE_CHECKING:
    from plait.platform.core import Sequence


class OpenRequests:
    """Unfinished requests by id."""

    def __init__(self) -> None:
        self._sequences: dict[str, list[Sequence]] = {}
        self._queued: set[str] = set()  # not yet admitted for the first time
        self._deadlines: list[tuple[float, int, str]] = []  # heap; may name ended requests

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_queued(self) -> int:
        """Requests that wait for their first admission."""
        return len(self._queued)

    def add(self, sequences: list[Sequence]) -> None:
        """Know a new request by all its sequences."""
        request = sequences[0].request
        self._sequences[request.request_id] = sequences
        self._queued.add(request.request_id)
        if request.deadline_s is not None:
            entry = (request.deadline_s, sequences[0].arrival, request.request_id)
            heapq.heappush(self._deadlines, entry)

    def admitted(self, request_id: str) -> bool:
        """A sequence of it runs; whether that is the first time."""
        first = request_id in self._queued
        self._queued.discard(request_id)
        return first

    def sequences(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request; none of an unknown one."""
        sequences = self._sequences.get(request_id, ())
        return [s for s in sequences if s.state is not SequenceState.FINISHED]

    def ended(self, sequence: Sequence) -> None:
        """A sequence has finished; with the last one its request goes."""
        request_id = sequence.request.request_id
        if not self.sequences(request_id):
            del self._sequences[request_id]
            self._queued.discard(request_id)

    def expire(self, now_s: float) -> Iterator[str]:
        """The requests whose deadline has passed at `now_s`, each once."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequences = self.sequences(request_id)
            if sequences and sequences[0].arrival == arrival:  # not a later one of the same id
                yield request_id

    def unfinished(self) -> list[Sequence]:
        """All sequences that have not ended."""
        return [s for request_id in self._sequences for s in self.sequences(request_id)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the queue is of open requests."""
        assert self._queued <= self._sequences.keys(), "an ended request is queued"
        assert all(self.sequences(r) for r in self._sequences), "an ended request is kept"
