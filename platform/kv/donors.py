"""Parked sequences that give blocks from their tails: how many can be had, and who gives first.

The lowest-ordered gives first, and loses only what is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.platform.kv.pool import NULL_BLOCK

if TYPE_CHECKING:
    from plait.platform.core import Sequence
    from plait.platform.kv.tables import BlockTables, Tables


@dataclass(frozen=True, slots=True)
class Donors:
    """Sequences whose blocks another may take, in the order in which it does; there may be none."""

    tables: BlockTables
    sequences: tuple[Sequence, ...]

    @classmethod
    def of(
        cls, sequence: Sequence, tables: BlockTables, *, victims: Iterable[Sequence] = ()
    ) -> Donors:
        """Parked sequences of no better priority, and before them `victims`, as if parked."""
        worst = sequence.request.priority
        parked = (
            donor
            for donor in reversed(tables.parked)
            if donor.request.priority >= worst and donor is not sequence
        )
        return cls(tables, (*victims, *parked))

    def obtainable(self, g: int, want: int) -> int:
        """Blocks of a group that are free or that donors alone hold; exact only below `want`."""
        pool = self.tables.pools[g]
        if pool.num_free >= want or not self.sequences:
            return pool.num_free
        held: Counter[int] = Counter()
        for donor in self.sequences:
            held.update(donor.block_ids[g])
        del held[NULL_BLOCK]
        return pool.num_free + sum(
            1 for block, count in held.items() if count == pool.references(block)
        )

    def take(self, need: Iterable[int]) -> Tables:
        """Free blocks, so many of each group; as many were `obtainable`."""
        taken: Tables = []
        for g, (pool, count) in enumerate(zip(self.tables.pools, need, strict=True)):
            while pool.num_free < count:
                self.tables.trim(self._first(g), g)
            taken.append([pool.take() for _ in range(count)])
        return taken

    def _first(self, g: int) -> Sequence:
        """The first one whose last block comes free, if need be together with others'."""
        pool = self.tables.pools[g]
        holding = [d for d in self.sequences if d.block_ids[g] and d.block_ids[g][-1]]
        for donor in holding:
            if pool.references(donor.block_ids[g][-1]) == 1:
                return donor
        tails = Counter(donor.block_ids[g][-1] for donor in holding)
        for donor in holding:
            tail = donor.block_ids[g][-1]
            if pool.references(tail) == tails[tail]:
                return donor
        return holding[0]
