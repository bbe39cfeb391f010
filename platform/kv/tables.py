"""Block tables: which blocks each sequence holds, what it publishes of them, and what it lets go.

A sequence has one table per KV group, indexed by position // block size. A full group keeps every
entry; a sliding group keeps those that a next row can still see, and its older entries are null:

    table of a sliding group    0  0  0  7  3  9  5
                                └ out of ┘  └ in the window of the next row, then reserved
    `first` = 3                  the window

May enter: what happens to the blocks that a sequence has. New ones come by way of `allocator`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.platform.kv.hashing import KeyChain
from plait.platform.kv.pool import NULL_BLOCK, BlockPool
from plait.platform.kv.prefix import find_prefix, first_visible
from plait.platform.scheduling.ordering import OrderedSequences

if TYPE_CHECKING:
    from plait.platform.config import CacheConfig
    from plait.platform.core import Sequence

Tables = list[list[int]]


@dataclass(slots=True)
class _Record:
    """What is kept of a sequence beside its tables."""

    chain: KeyChain | None  # None without prefix caching
    first: list[int]  # per group: entries before it are null
    num_published: int = 0
    # A leader keeps what the next row after this token sees, until its siblings have forked.
    held_from: int = sys.maxsize


class BlockTables:
    """Owns the pools of all groups and every sequence's `block_ids`.

    A hit, or what a parked sequence keeps, may end inside one of `Request.spans`: the keys of its
    blocks tell the whole span, so they hold what computing the whole of it gave. The next step
    then goes on to the span's end.
    """

    def __init__(self, cache: CacheConfig) -> None:
        self.block_size = cache.block_size
        self.pools = tuple(BlockPool(group.num_blocks) for group in cache.groups)
        self.windows = tuple(group.window for group in cache.groups)
        self.is_caching = cache.enable_prefix_caching
        self.parked = OrderedSequences()  # those out of the running set that hold blocks
        self._sliding = tuple(g for g, w in enumerate(self.windows) if w is not None)
        self._records: dict[int, _Record] = {}

    @property
    def usage(self) -> float:
        """Share of blocks held, of the fullest group."""
        return max(1.0 - pool.num_free / pool.num_usable for pool in self.pools)

    def num_blocks(self, num_tokens: int) -> int:
        """Entries of a table with slots for the first `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def covers(self, sequence: Sequence, end: int) -> bool:
        """Whether the tables have slots for all tokens before `end`."""
        for table in sequence.block_ids:  # noqa: SIM110  (all() is three times as slow here)
            if len(table) * self.block_size < end:
                return False
        return True

    # --- life of a sequence ------------------------------------------------------------------

    def open(self, sequence: Sequence, *, forks: bool) -> None:
        """Know a new sequence. With `forks`, what its siblings will share is kept for them."""
        chain = KeyChain(sequence.request, self.block_size) if self.is_caching else None
        record = _Record(chain, [0] * len(self.pools))
        if forks:
            record.held_from = self._shared_tokens(sequence)
        self._records[sequence.seq_id] = record
        sequence.block_ids = [[] for _ in self.pools]

    def close(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence and forget it."""
        self.forget(sequence)
        del self._records[sequence.seq_id]

    def forget(self, sequence: Sequence) -> None:
        """Free all blocks: nothing of the sequence is computed any longer.

        Tails first, so that they are reused before the heads, which more prompts have in common.
        """
        for pool, table in zip(self.pools, sequence.block_ids, strict=True):
            _drop_tail(pool, table, 0)
        record = self._records[sequence.seq_id]
        record.first = [0] * len(self.pools)
        record.num_published = 0
        sequence.num_computed_tokens = 0
        self.parked.discard(sequence)

    def settle(self, sequence: Sequence) -> None:
        """After computed tokens were added: publish full blocks, free what left the window.

        All of `tokens[:num_computed_tokens]` is computed and verified.
        """
        record = self._records[sequence.seq_id]
        full = sequence.num_computed_tokens // self.block_size
        if record.chain is not None and full > record.num_published:
            keys = record.chain.extend(sequence.tokens, full)
            for pool, table in zip(self.pools, sequence.block_ids, strict=True):
                for i in range(record.num_published, full):
                    pool.publish(table[i], keys[i])
            record.num_published = full
        if self._sliding:
            self._slide(sequence, record)

    def fork(self, leader: Sequence, siblings: Iterable[Sequence]) -> None:
        """Let siblings share the leader's blocks of the prompt, without its last token.

        Only full blocks are shared, and full blocks are never written again, so nothing is
        copied: each sibling computes the prompt's rest into a block of its own. Siblings come
        out parked. The leader's whole prompt is computed.
        """
        source = self._records[leader.seq_id]
        start = self._shared_tokens(leader)
        num_shared = start // self.block_size
        for sibling in siblings:
            record = self._records[sibling.seq_id]
            record.chain = source.chain.copy(num_shared) if source.chain else None
            record.num_published = num_shared
            for g, pool in enumerate(self.pools):
                record.first[g] = first = self._first(g, start)
                shared = leader.block_ids[g][first:num_shared]
                for block in shared:
                    pool.hold(block)
                sibling.block_ids[g] = [NULL_BLOCK] * first + shared
            sibling.num_computed_tokens = start
            self._set_parked(sibling)
        source.held_from = sys.maxsize
        self._slide(leader, source)

    def park(self, sequence: Sequence) -> None:
        """Out of the running set: keep what is computed, for as long as nobody needs it."""
        self._cut(sequence, sequence.num_computed_tokens)
        self._set_parked(sequence)

    # --- blocks come and go --------------------------------------------------------------------

    def resume(self, sequence: Sequence, hit_limit: int) -> tuple[int, Tables]:
        """Where a sequence that is not running can go on, and with which tables.

        That is behind its longest prefix hit of at most `hit_limit` tokens, whose blocks are not
        held for it yet, or behind its own computed tokens, if these are more.
        """
        chain = self._records[sequence.seq_id].chain
        computed = sequence.num_computed_tokens
        num_blocks = min(hit_limit, len(sequence.tokens) - 1) // self.block_size
        if chain is not None and num_blocks * self.block_size > computed:
            keys = chain.extend(sequence.tokens, num_blocks)[:num_blocks]
            own = [table[: computed // self.block_size] for table in sequence.block_ids]
            hit = find_prefix(self.pools, self.windows, self.block_size, keys, own)
            if hit is not None:
                return len(hit[0]) * self.block_size, hit
        return computed, [list(table) for table in sequence.block_ids]

    def replace(self, sequence: Sequence, start: int, tables: Tables) -> None:
        """Give a sequence new tables, whose blocks are held for it; it goes on at `start`."""
        record = self._records[sequence.seq_id]
        for g, pool in enumerate(self.pools):
            table, old = tables[g], sequence.block_ids[g]
            for i in reversed(range(len(old))):
                if old[i] and table[i : i + 1] != [old[i]]:
                    pool.drop(old[i])
            sequence.block_ids[g] = table
        if start != sequence.num_computed_tokens:
            record.num_published = start // self.block_size
            record.first = [self._first(g, start) for g in range(len(self.pools))]
            sequence.num_computed_tokens = start
        self.parked.discard(sequence)

    def trim(self, donor: Sequence, g: int) -> None:
        """Take the last block of a parked sequence, and with it the tokens computed there."""
        table = donor.block_ids[g]
        self.pools[g].drop(table.pop())
        self._cut(donor, min(donor.num_computed_tokens, len(table) * self.block_size))

    def _cut(self, sequence: Sequence, num_computed: int) -> None:
        """Keep only what the first `num_computed` tokens need; nothing, if they are no start."""
        num_blocks = self.num_blocks(num_computed)
        for pool, table in zip(self.pools, sequence.block_ids, strict=True):
            _drop_tail(pool, table, num_blocks)
        sequence.num_computed_tokens = num_computed
        record = self._records[sequence.seq_id]
        record.num_published = min(record.num_published, num_computed // self.block_size)
        if num_computed == 0 or not self._resumable(sequence, record):
            self.forget(sequence)

    def _resumable(self, sequence: Sequence, record: _Record) -> bool:
        computed = sequence.num_computed_tokens
        return all(record.first[g] <= self._first(g, computed) for g in self._sliding)

    def _set_parked(self, sequence: Sequence) -> None:
        if any(table and table[-1] for table in sequence.block_ids):
            self.parked.add(sequence)

    def _first(self, g: int, start: int) -> int:
        """The first table entry that a row at position `start` can see."""
        return first_visible(self.windows[g], start, self.block_size)

    def _shared_tokens(self, leader: Sequence) -> int:
        # The last token of the prompt is computed by each sibling, for its own first logits.
        return (leader.num_prompt_tokens - 1) // self.block_size * self.block_size

    def _slide(self, sequence: Sequence, record: _Record) -> None:
        start = min(sequence.num_computed_tokens, record.held_from)
        for g in self._sliding:
            first, table = self._first(g, start), sequence.block_ids[g]
            # The head of the window goes first, so that it is also reused first.
            for i in range(record.first[g], first):
                self.pools[g].drop(table[i])
                table[i] = NULL_BLOCK
            record.first[g] = max(record.first[g], first)

    # --- integrity -----------------------------------------------------------------------------

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless blocks, tables and keys agree. No reservation is open.

        `sequences` are all that were opened and not closed.
        """
        sequences = list(sequences)
        assert self._records.keys() == {s.seq_id for s in sequences}, "not the open sequences"
        for g, pool in enumerate(self.pools):
            holders = Counter(block for s in sequences for block in s.block_ids[g] if block)
            pool.check_integrity(holders)
            for sequence in sequences:
                self._check_table(g, sequence)
        for sequence in self.parked:
            assert self._resumable(sequence, self._records[sequence.seq_id]), "parked in vain"

    def _check_table(self, g: int, sequence: Sequence) -> None:
        table, record = sequence.block_ids[g], self._records[sequence.seq_id]
        held = [block for block in table if block]
        assert len(set(held)) == len(held), "a block stands twice in one table"
        assert all(table[record.first[g] :]), "a hole in a table"
        assert not any(table[: record.first[g]]), "a block before the window"
        computed = sequence.num_computed_tokens
        assert len(table) * self.block_size >= computed, "computed tokens without slots"
        assert not computed or record.first[g] <= self._first(g, computed), "no whole window"
        if record.chain is not None:
            keys = record.chain.extend(sequence.tokens, computed // self.block_size)
            for i, block in enumerate(table):
                key = self.pools[g].key(block) if block else None
                assert key is None or key == keys[i], "a block under a wrong key"


def _drop_tail(pool: BlockPool, table: list[int], length: int) -> None:
    while len(table) > length:
        block = table.pop()
        if block:
            pool.drop(block)
