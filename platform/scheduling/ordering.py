"""Sequences in the order in which they are served: priority, then arrival, then index."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.core import Sequence

Order = tuple[int, int, int]


def order(sequence: Sequence) -> Order:
    """The place of a sequence among all others; smaller is served first, no two are equal."""
    return (sequence.request.priority, sequence.arrival, sequence.index)


class OrderedSequences:
    """A set of sequences kept in serving order."""

    __slots__ = ("_orders", "_sequences")

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._place(sequence) is not None

    def first(self) -> Sequence | None:
        """The one served first, or None if there is none."""
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        """Put a sequence, which is not yet here, in its place."""
        key = order(sequence)
        place = bisect_left(self._orders, key)
        self._orders.insert(place, key)
        self._sequences.insert(place, sequence)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is here."""
        place = self._place(sequence)
        if place is not None:
            del self._orders[place]
            del self._sequences[place]

    def _place(self, sequence: Sequence) -> int | None:
        key = order(sequence)
        place = bisect_left(self._orders, key)
        found = place < len(self._orders) and self._orders[place] == key
        return place if found else None
