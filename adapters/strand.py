"""The part of adapters in a step: a sequence runs only while all its generations are on the device.

Then it holds a *lease* on each, and what is leased is neither evicted nor replaced. A sequence that
lacks some waits (`claims`) while others run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.adapters.claims import Claims, Waiter
from plait.platform.core import Sequence, SequenceState
from plait.platform.strand import Strand

if TYPE_CHECKING:
    from plait.adapters.pool import AdapterPool
    from plait.adapters.tiers import Held

_PIN_RANK = -(1 << 62)  # before any priority


@dataclass(frozen=True, slots=True)
class _Lease:
    sequence: Sequence
    generations: tuple[str, ...]
    since_s: float  # when it began to wait


class AdapterStrand(Strand):
    """Implements `platform.strand.Strand`.

    A waiting sequence whose adapter was asked for more than `drain_s` ago makes room for itself:
    see `claims`.
    """

    def __init__(self, pool: AdapterPool, *, drain_s: float) -> None:
        self._pool = pool
        self._claims = Claims(pool, drain_s=drain_s, work_left=self._work_left)
        self._leases: dict[int, _Lease] = {}
        self._now_s = 0.0

    def begin(self, now_s: float) -> None:
        """See `Strand.begin`."""
        self._now_s = now_s
        self._pool.begin()
        for generation, error in self._pool.take_failures():
            self._claims.fail(generation, error)
        self._see_to_pins()
        self._claims.grant(now_s)

    def admit(self, sequence: Sequence) -> bool:
        """See `Strand.admit`."""
        if not sequence.request.adapters or sequence.seq_id in self._leases:
            return True
        waiter = self._claims.get(sequence.seq_id)
        if waiter is not None and waiter.failure is not None:
            raise waiter.failure
        generations = tuple(dict.fromkeys(use.generation for use in sequence.request.adapters))
        helds = [self._pool.get(generation) for generation in generations]
        since_s = self._now_s if waiter is None else waiter.since_s
        if self._claims.are_open(helds) or self._claims.are_kept_ready(generations):
            # Leases come before the claim goes, so that nothing is free in between.
            self._lease(_Lease(sequence, generations, since_s), helds)
            if waiter is not None:
                self._claims.remove(waiter)
            return True
        self._pool.check_fits(generations)
        if waiter is None:
            self._claims.add(self._waiter(sequence, generations, since_s))
        return False

    def release(self, sequence: Sequence) -> None:
        """See `Strand.release`."""
        lease = self._leases.pop(sequence.seq_id, None)
        goes_on = sequence.state is SequenceState.WAITING
        if lease is None:
            waiter = self._claims.get(sequence.seq_id)
            if waiter is not None and not goes_on:
                self._claims.remove(waiter)
            return
        if goes_on:
            waiter = self._waiter(sequence, lease.generations, lease.since_s)
            self._claims.add_claimed(waiter)
        helds = [self._pool.get(generation) for generation in lease.generations]
        for held in helds:
            held.leases -= 1
        for held in helds:
            self._pool.unused(held)

    @property
    def busy(self) -> bool:
        """See `Strand.busy`: the best of those that wait will run, once nothing else does."""
        return len(self._claims) > 0

    def wait(self, timeout_s: float) -> None:
        """See `Strand.wait`."""
        self._pool.wait(timeout_s)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """See `Strand.check_integrity`."""
        with_adapters = {s.seq_id for s in running if s.request.adapters}
        assert self._leases.keys() == with_adapters, "leases of others than those that run"
        leases: Counter[str] = Counter()
        for lease in self._leases.values():
            leases.update(lease.generations)
        for generation, held in self._pool.known.items():
            assert held.leases == leases[generation], "leases miscounted"
        self._claims.check_integrity()
        self._pool.check_integrity()

    def _lease(self, lease: _Lease, helds: list[Held]) -> None:
        self._leases[lease.sequence.seq_id] = lease
        for held in helds:
            held.leases += 1
            self._pool.tiers.use(held)
        self._pool.changed()

    def _waiter(self, sequence: Sequence, generations: tuple[str, ...], since_s: float) -> Waiter:
        rank = (sequence.request.priority, since_s, sequence.seq_id)
        return Waiter(who=sequence.seq_id, generations=generations, rank=rank)

    def _work_left(self, generation: str) -> int:
        """Tokens until the last sequence with a generation ends at the latest."""
        return max(
            (
                lease.sequence.max_total_tokens - lease.sequence.num_computed_tokens
                for lease in self._leases.values()
                if generation in lease.generations
            ),
            default=0,
        )

    def _see_to_pins(self) -> None:
        """A pin waits as a sequence does, but before all of them, and lets go once it is placed."""
        for held in self._pool.pins_to_place():
            if self._claims.get(held.generation) is None:
                rank = (_PIN_RANK, self._now_s, len(self._claims))
                generations = (held.generation,)
                self._claims.add(Waiter(who=held.generation, generations=generations, rank=rank))
        for waiter in self._claims.pins():
            held = self._pool.get(waiter.generations[0])
            if waiter.failure is not None and held.pinned:
                self._pool.pin(held.generation, pinned=False)
            if held.is_placed or not held.pinned:
                self._claims.remove(waiter)
