"""Who gets room on the device, in which order, and what makes room for whoever waits too long.

A waiter needs one generation or several, and takes the bytes of all of them or none: a *claim*. Of
two waiters the better is that of better priority, then that which began to wait first. Room for a
claim comes from

    1  bytes that are free
    2  generations that nobody uses or claims, least recently used first
    3  claims of worse waiters, worst first

so nothing but what runs stands in the way of the best waiter, and it has its claim as soon as
nothing runs. The best of those that have waited longer than the drain threshold makes what runs
give way too: generations with the least work left are *drained*, that is, no sequence begins to
run with them until the waiter has its claim. It then has it within the longest remaining time of
the sequences that ran when the drain began. One is drained for at a time, and what is drained or
free for it is taken by nobody else.

What a waiter has claimed is kept ready for all of its flow: the scheduler asks the first of a flow
alone, which need not be the one that began to wait. If that one were told to wait for a drain, the
claim would never be used, and the drain, which only worse waiters need, would never end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.adapters.tiers import Held

if TYPE_CHECKING:
    from plait.adapters.pool import AdapterPool
    from plait.platform.errors import PlaitError


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """Who waits for generations: a sequence, or a pin."""

    who: Hashable
    generations: tuple[str, ...]
    rank: tuple[int, float, int]  # priority, since when, and what makes it unique; less is better
    is_claimed: bool = False  # the bytes of all its generations are taken for it
    failure: PlaitError | None = None  # one of them cannot be had

    @property
    def since_s(self) -> float:
        """When it began to wait."""
        return self.rank[1]


class Claims:
    """All waiters, and the drain for one of them. `work_left` is that of what runs with one."""

    def __init__(
        self, pool: AdapterPool, *, drain_s: float, work_left: Callable[[str], int]
    ) -> None:
        self._pool = pool
        self._tiers = pool.tiers
        self._drain_s = drain_s
        self._work_left = work_left
        self._waiters: dict[Hashable, Waiter] = {}
        self._claimed: dict[Hashable, Waiter] = {}  # of these
        self._drained_for: Waiter | None = None
        self._drained: set[str] = set()
        self._num_changes = -1  # of the tiers, when claims were last granted

    def __len__(self) -> int:
        return len(self._waiters)

    def get(self, who: Hashable) -> Waiter | None:
        """The waiter of that identity, if there is one."""
        return self._waiters.get(who)

    def add(self, waiter: Waiter) -> None:
        """Let it wait. If bytes are free it has its claim at once, else perhaps by `grant`.

        Nobody is evicted at once: whoever is asked next may be about to run with it.
        """
        self._enter(waiter)
        self._try_claim(waiter, evict=False)

    def add_claimed(self, waiter: Waiter) -> None:
        """Let one wait that held leases until now: its generations are on the device."""
        self._enter(waiter)
        self._claim(waiter)

    def remove(self, waiter: Waiter) -> None:
        """It waits no longer. What it claimed, somebody else may have."""
        helds = self._helds(waiter)
        self._unclaim(waiter)
        del self._waiters[waiter.who]
        if waiter is self._drained_for:
            self._end_drain()
        for held in helds:
            held.waiting -= 1
            self._pool.unused(held)

    def is_ready(self, waiter: Waiter) -> bool:
        """Whether all that it claimed is placed."""
        return waiter.is_claimed and all(held.is_placed for held in self._helds(waiter))

    def are_kept_ready(self, generations: tuple[str, ...]) -> bool:
        """Whether somebody who waits for just these has claimed them, and all are placed."""
        return any(
            w.generations == generations and self.is_ready(w) for w in self._claimed.values()
        )

    def are_open(self, generations: Iterable[Held]) -> bool:
        """Whether these are placed, and nothing is drained of them: a sequence may begin."""
        return all(h.is_placed and h.generation not in self._drained for h in generations)

    def fail(self, generation: str, error: PlaitError) -> None:
        """A generation cannot be had: all that wait for it fail."""
        for waiter in self._waiters.values():
            if generation in waiter.generations:
                waiter.failure = error
                self._unclaim(waiter)
                if waiter is self._drained_for:
                    self._end_drain()

    def pins(self) -> list[Waiter]:
        """The waiters that are pins: they go by their generation."""
        return [waiter for waiter in self._waiters.values() if isinstance(waiter.who, str)]

    def grant(self, now_s: float) -> None:
        """Give claims to those that can have them, best first, and see to the drain."""
        waiting = [w for w in self._waiters.values() if not w.is_claimed and w.failure is None]
        if not waiting:
            return
        waiting.sort(key=lambda waiter: waiter.rank)
        if self._num_changes != self._tiers.num_changes:
            for waiter in waiting:
                if self._needed(waiter) <= self._within_reach():
                    self._try_claim(waiter, evict=True)
            self._num_changes = self._tiers.num_changes
        self._see_to_drain(waiting, now_s)

    # --- claims ----------------------------------------------------------------------------------

    def _enter(self, waiter: Waiter) -> None:
        self._waiters[waiter.who] = waiter
        for held in self._helds(waiter):
            held.waiting += 1
        self._pool.changed()

    def _needed(self, waiter: Waiter) -> int:
        return sum(held.device_bytes for held in self._helds(waiter) if not held.on_device)

    def _within_reach(self) -> int:
        """Bytes that nothing runs with: more than these no claim can have."""
        idle = (h for h in self._tiers.on_device() if h.is_placed and not (h.leases or h.pinned))
        return self._tiers.device_free + sum(held.device_bytes for held in idle)

    def _helds(self, waiter: Waiter) -> list[Held]:
        return [self._pool.get(generation) for generation in waiter.generations]

    def _claim(self, waiter: Waiter) -> None:
        waiter.is_claimed = True
        self._claimed[waiter.who] = waiter
        for held in self._helds(waiter):
            held.claims += 1
            self._tiers.use(held)

    def _unclaim(self, waiter: Waiter) -> None:
        if not waiter.is_claimed:
            return
        waiter.is_claimed = False
        del self._claimed[waiter.who]
        helds = self._helds(waiter)
        for held in helds:
            held.claims -= 1
        for held in helds:
            self._pool.unused(held)

    def _try_claim(self, waiter: Waiter, *, evict: bool) -> None:
        own = self._helds(waiter)
        for_it = waiter is self._drained_for
        if not for_it and any(held.generation in self._drained for held in own):
            return
        needed = self._needed(waiter)
        room = self._tiers.device_free - (0 if for_it else self._pool.promised_bytes)
        if needed > room and not (evict and self._make_room(waiter, own, needed - room)):
            return
        missing = [held for held in own if not held.on_device]
        self._claim(waiter)
        for held in missing:
            self._pool.bring(held)
        if for_it:
            self._end_drain()

    def _make_room(self, waiter: Waiter, own: list[Held], missing: int) -> bool:
        """Evict generations of that many bytes, or nothing if there are not as many."""
        kept = set() if waiter is self._drained_for else self._drained
        mine = {held.generation for held in own}
        going: list[Held] = []
        for held in self._tiers.on_device():
            if missing <= 0:
                break
            if held.is_evictable and held.generation not in kept | mine:
                going.append(held)
                missing -= held.device_bytes
        revoked: list[Waiter] = []
        if missing > 0:
            revoked, more = self._revocable(waiter, kept | mine, missing)
            missing -= sum(held.device_bytes for held in more)
            going += more
        if missing > 0:
            return False
        for worse in revoked:
            self._unclaim(worse)
        for held in going:
            if held.is_placed:  # if it was dropped it went with its last claim
                self._tiers.evict(held)
        return True

    def _revocable(
        self, waiter: Waiter, kept: set[str], missing: int
    ) -> tuple[list[Waiter], list[Held]]:
        """Worse waiters, and what comes free on the device without their claims."""
        claims: Counter[str] = Counter()
        revoked, freed = [], []
        claimed = [w for w in self._claimed.values() if w.rank > waiter.rank]
        for worse in sorted(claimed, key=lambda each: each.rank, reverse=True):
            if missing <= 0:
                break
            revoked.append(worse)
            claims.update(worse.generations)
            for held in self._helds(worse):
                alone = held.claims == claims[held.generation] and not held.leases
                free = alone and held.is_placed and not held.pinned
                if free and held.generation not in kept:
                    freed.append(held)
                    missing -= held.device_bytes
        return revoked, freed

    # --- the drain -------------------------------------------------------------------------------

    def _see_to_drain(self, waiting: list[Waiter], now_s: float) -> None:
        if self._drained_for is None:
            late = (w for w in waiting if not w.is_claimed and w.since_s + self._drain_s <= now_s)
            self._drained_for = next(late, None)
        if self._drained_for is not None:
            self._choose_drained(self._drained_for)

    def _choose_drained(self, waiter: Waiter) -> None:
        """Drain more until that and what is free suffice; what nobody uses comes first."""
        needed, free = self._needed(waiter), self._tiers.device_free
        others = [
            held
            for held in self._tiers.on_device()
            if not held.pinned and held.generation not in waiter.generations
        ]
        drained = sum(h.device_bytes for h in others if h.generation in self._drained)
        left = [h for h in others if h.generation not in self._drained]
        left.sort(key=lambda held: (held.in_use, self._work_left(held.generation)))
        for held in left:
            if drained + free >= needed:
                break
            self._drained.add(held.generation)
            drained += held.device_bytes
        self._pool.promised_bytes = max(0, needed - drained)

    def _end_drain(self) -> None:
        self._drained_for = None
        self._drained.clear()
        self._pool.promised_bytes = 0
        self._pool.changed()

    # --- integrity -------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless claims are counted, and a drain is for somebody."""
        claims: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for waiter in self._waiters.values():
            waiting.update(waiter.generations)
            if waiter.is_claimed:
                assert waiter.failure is None
                claims.update(waiter.generations)
        for generation, held in self._pool.known.items():
            assert held.claims == claims[generation], "claims miscounted"
            assert held.waiting == waiting[generation], "waiters miscounted"
        assert self._claimed == {k: w for k, w in self._waiters.items() if w.is_claimed}
        if self._drained_for is None:
            assert not self._drained
            assert not self._pool.promised_bytes
        else:
            assert self._waiters.get(self._drained_for.who) is self._drained_for
