"""Blocks held for a sequence before they are its own: taken whole, then committed or released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.core import Sequence
    from plait.platform.kv.tables import BlockTables, Tables


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Blocks held for one sequence but in none of its tables. Ends by `commit` or `release`.

    `start` is where computing will go on, `num_tokens` for how many tokens there are slots.
    """

    sequence: Sequence
    start: int
    tables: Tables  # as they will be, without `taken`
    hits: Tables  # entries of `tables` that the sequence does not hold yet
    taken: Tables
    num_tokens: int = 0
    owner: BlockTables  # of all tables

    @classmethod
    def of_hits(
        cls, sequence: Sequence, start: int, tables: Tables, owner: BlockTables
    ) -> Reservation:
        """Hold what of `tables` the sequence does not hold yet."""
        hits = []
        for pool, table, own in zip(owner.pools, tables, sequence.block_ids, strict=True):
            hits.append([b for i, b in enumerate(table) if b and own[i : i + 1] != [b]])
            for block in hits[-1]:
                pool.hold(block)
        taken: Tables = [[] for _ in tables]
        return cls(
            sequence=sequence, start=start, tables=tables, hits=hits, taken=taken, owner=owner
        )

    def commit(self) -> None:
        """Put the blocks into the sequence's tables; it is parked no longer."""
        tables = [[*table, *new] for table, new in zip(self.tables, self.taken, strict=True)]
        self.owner.replace(self.sequence, self.start, tables)

    def release(self) -> None:
        """Give the blocks back; the sequence stays as it was."""
        for pool, hits, taken in zip(self.owner.pools, self.hits, self.taken, strict=True):
            for block in reversed([*hits, *taken]):
                pool.drop(block)
