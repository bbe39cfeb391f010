"""Which waiting sequence is next: by priority, then fair shares, then arrival.

A *flow* is what one tenant asks of one set of adapters. Shares are fair between tenants, by their
weights, and within a tenant between its flows: a tenant gains nothing from many adapters, and none
of its adapters starves another. Each tenant and each flow has a virtual counter of the work it was
given: prompt tokens, plus twice the generated ones, over the tenant's share (the prices of VTC,
Sheng et al. 2024). Of the best priority, those that ran before go on first, by arrival; then the
first of the flow with the smallest counter, of the tenant with the smallest. Within a flow order
is by arrival, so a single flow is served as if there were none.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING

from plait.platform.scheduling.ordering import OrderedSequences

if TYPE_CHECKING:
    from plait.platform.core import Sequence

PROMPT_PRICE = 1.0
OUTPUT_PRICE = 2.0  # a generated token takes a row of a step to itself
MAX_IDLE = 4096  # whose debts are remembered

Flow = tuple[str, tuple[str, ...]]
_Entry = tuple[int, tuple[float, float], int, Flow]  # priority, counters, arrival of the first


def flow_of(sequence: Sequence) -> Flow:
    """Tenant and generations of a sequence."""
    request = sequence.request
    return request.tenant, tuple(use.generation for use in request.adapters)


class Counters:
    """Virtual counters of those of one level that have unfinished sequences.

    Who comes back starts at the smallest counter of those that are there, or where it stopped if
    that is more: neither absence nor a short one gains it anything.
    """

    def __init__(self) -> None:
        self._counters: dict[Hashable, float] = {}
        self._num_sequences: dict[Hashable, int] = {}
        self._idle: dict[Hashable, float] = {}  # debts of some who are gone, oldest first

    def __getitem__(self, key: Hashable) -> float:
        """The work that one who is there was given."""
        return self._counters[key]

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there."""
        return not self._counters

    def open(self, key: Hashable) -> None:
        """A new sequence came."""
        if key not in self._num_sequences:
            least = min(self._counters.values(), default=0.0)
            self._counters[key] = max(self._idle.pop(key, 0.0), least)
            self._num_sequences[key] = 0
        self._num_sequences[key] += 1

    def close(self, key: Hashable) -> None:
        """A sequence ended."""
        self._num_sequences[key] -= 1
        if self._num_sequences[key]:
            return
        del self._num_sequences[key]
        counter = self._counters.pop(key)
        if not self._counters:
            self._idle.clear()  # nobody is left to be ahead of
        elif counter > min(self._counters.values()):
            self._idle[key] = counter
            if len(self._idle) > MAX_IDLE:
                del self._idle[next(iter(self._idle))]

    def charge(self, key: Hashable, work: float) -> None:
        """Count work of one who is there."""
        self._counters[key] += work

    def check_integrity(self, counts: Mapping[Hashable, int]) -> None:
        """Raise AssertionError unless those there are `counts`, with so many sequences each."""
        assert counts == self._num_sequences, "miscounted"
        assert counts.keys() == self._counters.keys(), "counters of others"


class FairShares:
    """The counters of tenants, and within each tenant of its flows."""

    def __init__(self) -> None:
        self._tenants = Counters()
        self._flows: dict[str, Counters] = {}  # of the tenants that are there
        self._flow_of: dict[int, Flow] = {}  # by sequence: each token is charged

    def counters(self, flow: Flow) -> tuple[float, float]:
        """The work that an active flow's tenant was given, and the flow itself."""
        return self._tenants[flow[0]], self._flows[flow[0]][flow]

    def open(self, sequence: Sequence) -> None:
        """A new sequence came."""
        tenant, _ = flow = self._flow_of[sequence.seq_id] = flow_of(sequence)
        self._tenants.open(tenant)
        self._flows.setdefault(tenant, Counters()).open(flow)

    def close(self, sequence: Sequence) -> None:
        """A sequence ended."""
        tenant, _ = flow = self._flow_of.pop(sequence.seq_id)
        self._tenants.close(tenant)
        self._flows[tenant].close(flow)
        if self._flows[tenant].is_empty:
            del self._flows[tenant]

    def charge(self, sequence: Sequence, *, prompt: int = 0, output: int = 0) -> None:
        """Count work of an unfinished sequence."""
        tenant, _ = flow = self._flow_of[sequence.seq_id]
        work = (PROMPT_PRICE * prompt + OUTPUT_PRICE * output) / sequence.request.share
        self._tenants.charge(tenant, work)
        self._flows[tenant].charge(flow, work)

    def check_integrity(self, unfinished: list[Sequence]) -> None:
        """Raise AssertionError unless exactly the unfinished sequences are counted."""
        flows = Counter(flow_of(sequence) for sequence in unfinished)
        assert self._flow_of == {s.seq_id: flow_of(s) for s in unfinished}, "flows have changed"
        self._tenants.check_integrity(Counter(sequence.request.tenant for sequence in unfinished))
        assert self._flows.keys() == {tenant for tenant, _ in flows}, "flows of others"
        for tenant, counters in self._flows.items():
            counters.check_integrity({f: n for f, n in flows.items() if f[0] == tenant})


class WaitingSequences:
    """All sequences that wait for a place; `first` says who is next in this step.

    Sequences that ran before, and siblings of such, are `resumed`; others are new.
    """

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._resumed = OrderedSequences()
        self._new: dict[tuple[int, Flow], dict[int, Sequence]] = {}  # each by arrival
        self._blocked: set[Flow] = set()
        # Flows of new sequences, built once a step; counters only grow until it is built anew.
        self._heap: list[_Entry] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._new and not self._resumed

    def __contains__(self, sequence: Sequence) -> bool:
        queue = self._new.get((sequence.request.priority, flow_of(sequence)), {})
        return sequence.seq_id in queue or sequence in self._resumed

    def add(self, sequence: Sequence, *, resumed: bool) -> None:
        """Let a sequence wait; a new one has arrived after all others."""
        if resumed:
            self._resumed.add(sequence)
            return
        key = (sequence.request.priority, flow_of(sequence))
        self._new.setdefault(key, {})[sequence.seq_id] = sequence
        self._heap = None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is here."""
        self._resumed.discard(sequence)
        key = (sequence.request.priority, flow_of(sequence))
        queue = self._new.get(key)
        if queue is None:
            return
        queue.pop(sequence.seq_id, None)
        if not queue:
            del self._new[key]

    def begin(self) -> None:
        """A step begins: counters have moved on, and nobody is passed over."""
        self._blocked.clear()
        self._heap = None

    def pass_over(self, sequence: Sequence) -> None:
        """Leave out a sequence, and what is after it in its flow, for the rest of the step."""
        self._blocked.add(flow_of(sequence))

    @property
    def num_passed_over(self) -> int:
        """Flows that were passed over in this step."""
        return len(self._blocked)

    def first(self) -> Sequence | None:
        """The next to be served, or None if none is left in this step."""
        resumed = self._first_resumed()
        new = self._first_new()
        if resumed is None or new is None:
            return resumed or new
        return resumed if resumed.request.priority <= new.request.priority else new

    def _first_resumed(self) -> Sequence | None:
        if not self._blocked:
            return self._resumed.first()
        return next((s for s in self._resumed if flow_of(s) not in self._blocked), None)

    def _first_new(self) -> Sequence | None:
        if self._heap is None:
            self._heap = [self._entry(*key) for key in self._new]
            heapq.heapify(self._heap)
        entries = self._heap
        while entries:
            priority, _, _, flow = entry = entries[0]
            if (priority, flow) not in self._new or flow in self._blocked:
                heapq.heappop(entries)
                continue
            current = self._entry(priority, flow)
            if entry == current:
                return next(iter(self._new[priority, flow].values()))
            heapq.heapreplace(entries, current)
        return None

    def _entry(self, priority: int, flow: Flow) -> _Entry:
        head = next(iter(self._new[priority, flow].values()))
        return priority, self._shares.counters(flow), head.arrival, flow
