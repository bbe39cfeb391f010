"""Who gets which blocks: admission and growth of sequences over all KV groups.

Everything is taken by `try_admit` or `try_grow`, which answer with a `Reservation` or None and
change nothing in the latter case. Blocks come from the free list, and when that is empty from the
tails of parked sequences (`donors`).

Why nothing deadlocks: a sequence that fits alone (`slots_alone`) can always go on once all
others are parked, because every block that it does not hold itself is then free or reclaimable.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.platform.kv.donors import Donors
from plait.platform.kv.reservation import Reservation
from plait.platform.scheduling.unbroken import least, longest

if TYPE_CHECKING:
    from plait.platform.core import Sequence
    from plait.platform.kv.tables import BlockTables


@dataclass(frozen=True, slots=True)
class _Terms:
    """How an admission may take: see `BlockAllocator.try_admit`."""

    hit_limit: int
    alone: bool
    donors: Donors


class BlockAllocator:
    """Takes blocks for the sequences of `tables`, of which it keeps nothing itself.

    `max_span` is the longest run of tokens that one step computes, apart from `Request.spans`. A
    sliding group reserves its window and such a run, a full group all known tokens. `watermark` is
    the share of blocks that an admission leaves to running sequences.
    """

    def __init__(self, tables: BlockTables, *, max_span: int, watermark: float) -> None:
        self._tables = tables
        self._max_span = max_span
        self._watermark = tuple(math.ceil(watermark * pool.num_usable) for pool in tables.pools)

    def slots_alone(self, *, forks: bool, unbroken: int = 1) -> int:
        """The longest sequence in tokens that fits when it has all blocks to itself.

        `unbroken`: tokens that one step computes at least, somewhere in it.
        """
        size, most = self._tables.block_size, sys.maxsize
        for pool, window in zip(self._tables.pools, self._tables.windows, strict=True):
            # A window of w tokens touches one block more than w - 1 tokens fill; a leader with
            # siblings keeps up to a block more.
            tokens = None
            if window is not None:
                tokens = window + unbroken - 1 + (size - 1 if forks else 0)
            if tokens is None or pool.num_usable < (tokens + size - 2) // size + 1:
                most = min(most, pool.num_usable * size)
        return most

    def try_grow(
        self, sequence: Sequence, num_tokens: int, *, reclaim: bool, at_least: int = 1
    ) -> Reservation | None:
        """Slots for up to `num_tokens` more tokens of a running sequence, or None.

        With `reclaim`, parked sequences of no better priority give blocks from their tails.
        """
        kept = self._tables
        donors = Donors.of(sequence, kept) if reclaim else Donors(kept, ())
        start, room = sequence.num_computed_tokens, num_tokens
        for g, table in enumerate(sequence.block_ids):
            want = kept.num_blocks(start + num_tokens) - len(table)
            if want > 0:
                got = min(want, donors.obtainable(g, want))
                room = min(room, (len(table) + got) * kept.block_size - start)
        if room < at_least:
            return None
        tables = [list(table) for table in sequence.block_ids]
        need = [max(0, kept.num_blocks(start + room) - len(table)) for table in tables]
        return Reservation(
            sequence=sequence,
            start=start,
            tables=tables,
            hits=[[] for _ in tables],
            taken=donors.take(need),
            num_tokens=room,
            owner=kept,
        )

    def try_admit(self, sequence: Sequence, *, hit_limit: int, alone: bool) -> Reservation | None:
        """Blocks for all known tokens of a sequence that is not running, or None.

        It goes on from its own computed tokens or from the longest prefix hit of at most
        `hit_limit` tokens, whichever is longer. `alone`: nothing runs, so the watermark is
        ignored and a sliding group may begin with less than a whole span.
        """
        terms = _Terms(hit_limit, alone, Donors.of(sequence, self._tables))
        reservation = self._reserve(sequence, terms)
        if reservation is None and alone:
            # Its own partial blocks may stand in the way of longer hits: without them it fits.
            self._tables.forget(sequence)
            reservation = self._reserve(sequence, terms)
        return reservation

    def could_admit(
        self, sequence: Sequence, *, hit_limit: int, alone: bool, victims: SequenceOf[Sequence]
    ) -> bool:
        """Whether `try_admit` would succeed if the running `victims` were parked first."""
        donors = Donors.of(sequence, self._tables, victims=victims)
        terms = _Terms(hit_limit, alone, donors)
        reservation, need = self._probe(sequence, terms)
        reservation.release()
        return need is not None

    def _reserve(self, sequence: Sequence, terms: _Terms) -> Reservation | None:
        reservation, need = self._probe(sequence, terms)
        if need is None:
            reservation.release()
            return None
        reservation.taken = terms.donors.take(need)
        ends = (
            (len(table) + len(taken)) * self._tables.block_size
            for table, taken in zip(reservation.tables, reservation.taken, strict=True)
        )
        reservation.num_tokens = min(ends) - reservation.start
        return reservation

    def _probe(self, sequence: Sequence, terms: _Terms) -> tuple[Reservation, list[int] | None]:
        """Hold the hits, and count the blocks needed beside them; None if there are too few."""
        start, tables = self._tables.resume(sequence, terms.hit_limit)
        reservation = Reservation.of_hits(sequence, start, tables, self._tables)
        need: list[int] = []
        for g in range(len(self._tables.pools)):
            count = self._admission_need(g, reservation, terms)
            if count is None:
                return reservation, None
            need.append(count)
        return reservation, need

    def _admission_need(self, g: int, reservation: Reservation, terms: _Terms) -> int | None:
        """Blocks of one group to take beside the hits, or None if they cannot be had."""
        start, held = reservation.start, len(reservation.tables[g])
        spans = reservation.sequence.request.spans
        end, sliding = len(reservation.sequence.tokens), self._tables.windows[g] is not None
        if sliding:
            end = min(end, start + max(self._max_span, longest(spans)))
        want = max(0, self._tables.num_blocks(end) - held)
        keep = 0 if terms.alone else self._watermark[g]
        got = terms.donors.obtainable(g, want + keep) - keep
        if got >= want:
            return want
        # Alone, a sliding group can do with less: it gets blocks back as it goes on.
        fewest = self._tables.num_blocks(start + least(spans, start)) - held
        return got if terms.alone and sliding and got >= fewest else None
