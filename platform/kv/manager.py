"""Block tables of all sequences over all KV groups: admission, growth, parking, sharing.

A sequence has one table per group, indexed by position // block size. A full group keeps every
entry; a sliding group keeps those that a next row can still see, and its older entries are null:

    table of a sliding group    0  0  0  7  3  9  5
                                └ out of ┘  └ in the window of the next row, then reserved
    `first` = 3                  the window

Everything is taken by `try_admit` or `try_grow`, which answer with a `Reservation` or None and
change nothing in the latter case. Blocks come from the free list, and when that is empty from the
tails of parked sequences, lowest-ordered first: a parked sequence loses only what is needed.

Why nothing deadlocks: a sequence that fits alone (`slots_alone`) can always go on once all
others are parked, because every block that it does not hold itself is then free or reclaimable.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plait.platform.kv.hashing import KeyChain
from plait.platform.kv.pool import NULL_BLOCK, BlockPool
from plait.platform.kv.prefix import find_prefix, first_visible
from plait.platform.ordering import OrderedSequences
from plait.platform.unbroken import least, longest

if TYPE_CHECKING:
    from plait.platform.config import CacheConfig
    from plait.platform.core import Sequence

Tables = list[list[int]]


@dataclass(slots=True)
class _Record:
    """What the manager keeps of a sequence beside its tables."""

    chain: KeyChain | None  # None without prefix caching
    first: list[int]  # per group: entries before it are null
    num_published: int = 0
    # A leader keeps what the next row after this token sees, until its siblings have forked.
    held_from: int = sys.maxsize


@dataclass(slots=True, kw_only=True)
class Reservation:
    """Blocks held for one sequence but in none of its tables. Ends by `commit` or `release`.

    `start` is where computing will go on, `num_tokens` for how many tokens there are slots.
    """

    sequence: Sequence
    start: int
    tables: Tables  # as they will be, without `taken`
    hits: Tables  # entries of `tables` that the sequence does not hold yet
    taken: Tables = field(default_factory=list)
    num_tokens: int = 0
    manager: KVManager

    def commit(self) -> None:
        """Put the blocks into the sequence's tables; it is parked no longer."""
        self.manager._install(self)

    def release(self) -> None:
        """Give the blocks back; the sequence stays as it was."""
        for pool, hits, taken in zip(self.manager.pools, self.hits, self.taken, strict=True):
            for block in reversed([*hits, *taken]):
                pool.drop(block)


@dataclass(frozen=True, slots=True)
class _Terms:
    """How an admission may take: see `KVManager.try_admit`."""

    hit_limit: int
    alone: bool
    donors: list[Sequence]


class KVManager:
    """Owns the pools of all groups and every sequence's `block_ids`.

    `max_span` is the longest run of tokens that one step computes, apart from `Request.spans`. A
    sliding group reserves its window and such a run, a full group all known tokens. `watermark` is
    the share of blocks that an admission leaves to running sequences.

    A hit, or what a parked sequence keeps, may end inside one of `Request.spans`: the keys of its
    blocks tell the whole span, so they hold what computing the whole of it gave. The next step
    then goes on to the span's end.
    """

    def __init__(self, cache: CacheConfig, *, max_span: int, watermark: float) -> None:
        self.block_size = cache.block_size
        self.pools = tuple(BlockPool(group.num_blocks) for group in cache.groups)
        self._windows = tuple(group.window for group in cache.groups)
        self._sliding = tuple(g for g, w in enumerate(self._windows) if w is not None)
        self._caching = cache.enable_prefix_caching
        self._max_span = max_span
        self._watermark = tuple(math.ceil(watermark * pool.num_usable) for pool in self.pools)
        self._records: dict[int, _Record] = {}
        self.parked = OrderedSequences()  # those out of the running set that hold blocks

    @property
    def usage(self) -> float:
        """Share of blocks held, of the fullest group."""
        return max(1.0 - pool.num_free / pool.num_usable for pool in self.pools)

    def slots_alone(self, *, forks: bool, unbroken: int = 1) -> int:
        """The longest sequence in tokens that fits when it has all blocks to itself.

        `unbroken`: tokens that one step computes at least, somewhere in it.
        """
        size, most = self.block_size, sys.maxsize
        for pool, window in zip(self.pools, self._windows, strict=True):
            # A window of w tokens touches one block more than w - 1 tokens fill; a leader with
            # siblings keeps up to a block more.
            tokens = None
            if window is not None:
                tokens = window + unbroken - 1 + (size - 1 if forks else 0)
            if tokens is None or pool.num_usable < (tokens + size - 2) // size + 1:
                most = min(most, pool.num_usable * size)
        return most

    # --- life of a sequence ------------------------------------------------------------------

    def open(self, sequence: Sequence, *, forks: bool) -> None:
        """Know a new sequence. With `forks`, what its siblings will share is kept for them."""
        chain = KeyChain(sequence.request, self.block_size) if self._caching else None
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

    # --- taking blocks -----------------------------------------------------------------------

    def covers(self, sequence: Sequence, end: int) -> bool:
        """Whether the tables have slots for all tokens before `end`."""
        for table in sequence.block_ids:  # noqa: SIM110  (all() is three times as slow here)
            if len(table) * self.block_size < end:
                return False
        return True

    def try_grow(
        self, sequence: Sequence, num_tokens: int, *, reclaim: bool, at_least: int = 1
    ) -> Reservation | None:
        """Slots for up to `num_tokens` more tokens of a running sequence, or None.

        With `reclaim`, parked sequences of no better priority give blocks from their tails.
        """
        donors = self._donors(sequence) if reclaim else []
        start, room = sequence.num_computed_tokens, num_tokens
        for g, table in enumerate(sequence.block_ids):
            want = self._blocks(start + num_tokens) - len(table)
            if want > 0:
                got = min(want, self._obtainable(g, want, donors))
                room = min(room, (len(table) + got) * self.block_size - start)
        if room < at_least:
            return None
        tables = [list(table) for table in sequence.block_ids]
        need = [max(0, self._blocks(start + room) - len(table)) for table in tables]
        return Reservation(
            sequence=sequence,
            start=start,
            tables=tables,
            hits=[[] for _ in tables],
            taken=self._take(need, donors),
            num_tokens=room,
            manager=self,
        )

    def try_admit(self, sequence: Sequence, *, hit_limit: int, alone: bool) -> Reservation | None:
        """Blocks for all known tokens of a sequence that is not running, or None.

        It goes on from its own computed tokens or from the longest prefix hit of at most
        `hit_limit` tokens, whichever is longer. `alone`: nothing runs, so the watermark is
        ignored and a sliding group may begin with less than a whole span.
        """
        terms = _Terms(hit_limit, alone, self._donors(sequence))
        reservation = self._reserve(sequence, terms)
        if reservation is None and alone:
            # Its own partial blocks may stand in the way of longer hits: without them it fits.
            self.forget(sequence)
            reservation = self._reserve(sequence, terms)
        return reservation

    def could_admit(
        self, sequence: Sequence, *, hit_limit: int, alone: bool, victims: SequenceOf[Sequence]
    ) -> bool:
        """Whether `try_admit` would succeed if the running `victims` were parked first."""
        terms = _Terms(hit_limit, alone, [*victims, *self._donors(sequence)])
        reservation, need = self._probe(sequence, terms)
        reservation.release()
        return need is not None

    def _reserve(self, sequence: Sequence, terms: _Terms) -> Reservation | None:
        reservation, need = self._probe(sequence, terms)
        if need is None:
            reservation.release()
            return None
        reservation.taken = self._take(need, terms.donors)
        ends = (
            (len(table) + len(taken)) * self.block_size
            for table, taken in zip(reservation.tables, reservation.taken, strict=True)
        )
        reservation.num_tokens = min(ends) - reservation.start
        return reservation

    def _probe(self, sequence: Sequence, terms: _Terms) -> tuple[Reservation, list[int] | None]:
        """Hold the hits, and count the blocks needed beside them; None if there are too few."""
        start, tables = self._find_start(sequence, terms.hit_limit)
        hits = []
        for pool, table, own in zip(self.pools, tables, sequence.block_ids, strict=True):
            hits.append([b for i, b in enumerate(table) if b and own[i : i + 1] != [b]])
            for block in hits[-1]:
                pool.hold(block)
        reservation = Reservation(
            sequence=sequence,
            start=start,
            tables=tables,
            hits=hits,
            taken=[[] for _ in tables],
            manager=self,
        )
        need: list[int] = []
        for g in range(len(self.pools)):
            count = self._admission_need(g, reservation, terms)
            if count is None:
                return reservation, None
            need.append(count)
        return reservation, need

    def _admission_need(self, g: int, reservation: Reservation, terms: _Terms) -> int | None:
        """Blocks of one group to take beside the hits, or None if they cannot be had."""
        start, held = reservation.start, len(reservation.tables[g])
        spans = reservation.sequence.request.spans
        end, sliding = len(reservation.sequence.tokens), self._windows[g] is not None
        if sliding:
            end = min(end, start + max(self._max_span, longest(spans)))
        want = max(0, self._blocks(end) - held)
        keep = 0 if terms.alone else self._watermark[g]
        got = self._obtainable(g, want + keep, terms.donors) - keep
        if got >= want:
            return want
        # Alone, a sliding group can do with less: it gets blocks back as it goes on.
        fewest = self._blocks(start + least(spans, start)) - held
        return got if terms.alone and sliding and got >= fewest else None

    def _obtainable(self, g: int, want: int, donors: list[Sequence]) -> int:
        """Blocks that are free or that donors alone hold; exact only where below `want`."""
        pool = self.pools[g]
        if pool.num_free >= want or not donors:
            return pool.num_free
        held: Counter[int] = Counter()
        for donor in donors:
            held.update(donor.block_ids[g])
        del held[NULL_BLOCK]
        return pool.num_free + sum(
            1 for block, count in held.items() if count == pool.references(block)
        )

    def _take(self, need: list[int], donors: list[Sequence]) -> Tables:
        taken: Tables = []
        for g, (pool, count) in enumerate(zip(self.pools, need, strict=True)):
            while pool.num_free < count:
                self._trim(self._choose_donor(g, donors), g)
            taken.append([pool.take() for _ in range(count)])
        return taken

    def _install(self, reservation: Reservation) -> None:
        sequence, record = reservation.sequence, self._records[reservation.sequence.seq_id]
        for g, pool in enumerate(self.pools):
            table, old = reservation.tables[g], sequence.block_ids[g]
            for i in reversed(range(len(old))):
                if old[i] and table[i : i + 1] != [old[i]]:
                    pool.drop(old[i])
            sequence.block_ids[g] = [*table, *reservation.taken[g]]
        if reservation.start != sequence.num_computed_tokens:
            record.num_published = reservation.start // self.block_size
            record.first = [self._first(g, reservation.start) for g in range(len(self.pools))]
            sequence.num_computed_tokens = reservation.start
        self.parked.discard(sequence)

    # --- parked sequences give blocks ----------------------------------------------------------

    def _donors(self, sequence: Sequence) -> list[Sequence]:
        """Parked sequences from which `sequence` may take, in the order in which it does."""
        worst = sequence.request.priority
        return [
            donor
            for donor in reversed(self.parked)
            if donor.request.priority >= worst and donor is not sequence
        ]

    def _choose_donor(self, g: int, donors: list[Sequence]) -> Sequence:
        """The lowest-ordered one whose last block comes free, if need be together with others'."""
        pool = self.pools[g]
        holding = [d for d in donors if d.block_ids[g] and d.block_ids[g][-1]]
        for donor in holding:
            if pool.references(donor.block_ids[g][-1]) == 1:
                return donor
        tails = Counter(donor.block_ids[g][-1] for donor in holding)
        for donor in holding:
            tail = donor.block_ids[g][-1]
            if pool.references(tail) == tails[tail]:
                return donor
        return holding[0]

    def _trim(self, donor: Sequence, g: int) -> None:
        """Take the last block of a parked sequence, and with it the tokens computed there."""
        table = donor.block_ids[g]
        self.pools[g].drop(table.pop())
        self._cut(donor, min(donor.num_computed_tokens, len(table) * self.block_size))

    def _cut(self, sequence: Sequence, num_computed: int) -> None:
        """Keep only what the first `num_computed` tokens need; nothing, if they are no start."""
        num_blocks = self._blocks(num_computed)
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

    # --- positions and windows -----------------------------------------------------------------

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _first(self, g: int, start: int) -> int:
        """The first table entry that a row at position `start` can see."""
        return first_visible(self._windows[g], start, self.block_size)

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

    def _find_start(self, sequence: Sequence, hit_limit: int) -> tuple[int, Tables]:
        """Where to go on: the longest hit beyond the own tokens, or these."""
        chain = self._records[sequence.seq_id].chain
        computed = sequence.num_computed_tokens
        num_blocks = min(hit_limit, len(sequence.tokens) - 1) // self.block_size
        if chain is not None and num_blocks * self.block_size > computed:
            keys = chain.extend(sequence.tokens, num_blocks)[:num_blocks]
            own = [table[: computed // self.block_size] for table in sequence.block_ids]
            hit = find_prefix(self.pools, self._windows, self.block_size, keys, own)
            if hit is not None:
                return len(hit[0]) * self.block_size, hit
        return computed, [list(table) for table in sequence.block_ids]

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
