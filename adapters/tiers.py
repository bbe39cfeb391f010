"""Where the weights of each generation lie, and how many bytes that takes: device, host, disk.

Bytes are those of packed weights, never counts of adapters. A tier never holds more than its
budget: what is on its way into one is counted from the moment on that it is allowed to come. The
host tier keeps copies of what is placed too, as long as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from plait.adapters.adapter import Adapter
from plait.adapters.info import AdapterInfo, AdapterLevel, AdapterState


class Job(Enum):
    """What is under way for a generation."""

    NONE = auto()
    QUEUED = auto()  # to be loaded, once there is room in the host tier
    LOADING = auto()
    PLACING = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """One generation that the engine knows. On disk it always is."""

    generation: str
    directory: Path
    allow_zero_delta: bool
    load_bytes: int  # host memory that loading it is expected to take
    info: AdapterInfo | None = None  # from its first load on
    adapter: Adapter | None = None  # the host tier's copy
    host_bytes: int = 0  # that it takes of the host tier, or will
    on_device: bool = False  # it takes bytes there: it is placed, or will be
    is_placed: bool = False
    job: Job = Job.NONE
    leases: int = 0  # sequences that run with it
    claims: int = 0  # who waits for it and has the bytes that it takes
    waiting: int = 0  # who waits for it at all
    pinned: bool = False
    dropped: bool = False  # it goes when nothing uses it
    promised: bool = False  # whoever asked was told that it is loaded, and has not dropped it since
    num_asked: int = 0  # answers that are owed for loading it

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes on the device when it is there. It was loaded once."""
        assert self.info is not None
        return self.info.device_bytes

    @property
    def in_use(self) -> bool:
        """Whether a sequence, or one that waits, holds it where it is."""
        return self.leases > 0 or self.claims > 0

    @property
    def is_evictable(self) -> bool:
        """Whether its place on the device can be had at once."""
        return self.is_placed and not self.pinned and not self.in_use

    @property
    def state(self) -> AdapterState:
        """As others see it."""
        level = AdapterLevel.DISK if self.adapter is None else AdapterLevel.HOST
        return AdapterState(
            level=AdapterLevel.DEVICE if self.is_placed else level,
            leases=self.leases,
            waiting=self.waiting,
            pinned=self.pinned,
        )


class Tiers:
    """The bytes of both memory tiers, each in the order of last use."""

    def __init__(
        self, *, device_budget: int, host_budget: int, remove: Callable[[str], None]
    ) -> None:
        self.device_budget = device_budget
        self.host_budget = host_budget
        self.device_bytes = 0
        self.host_bytes = 0
        self.num_evictions = 0  # from the device
        self.num_changes = 0  # of anything that decides who gets room there
        self._remove = remove
        self._device: dict[str, Held] = {}  # least recently used first
        self._host: dict[str, Held] = {}

    @property
    def device_free(self) -> int:
        """Bytes of the device that nothing takes."""
        return self.device_budget - self.device_bytes

    def on_device(self) -> Iterator[Held]:
        """All that takes bytes of the device, least recently used first."""
        return iter(self._device.values())

    def use(self, held: Held) -> None:
        """Note that a generation is used now."""
        for tier in (self._device, self._host):
            if held.generation in tier:
                tier[held.generation] = tier.pop(held.generation)

    def take_device(self, held: Held) -> None:
        """Count the bytes that a generation will take on the device; they are free."""
        assert not held.on_device
        assert held.device_bytes <= self.device_free, "beyond the budget"
        held.on_device = True
        self.device_bytes += held.device_bytes
        self._device[held.generation] = held
        self.num_changes += 1

    def free_device(self, held: Held) -> None:
        """Take a generation off the device, if it is there; nothing runs with it."""
        if not held.on_device:
            return
        assert not held.leases, "freed while it is used"
        if held.is_placed:
            self._remove(held.generation)
        held.on_device = held.is_placed = False
        self.device_bytes -= held.device_bytes
        del self._device[held.generation]
        self.num_changes += 1

    def evict(self, held: Held) -> None:
        """Take an evictable generation off the device, for another."""
        assert held.is_evictable
        self.free_device(held)
        self.num_evictions += 1

    def try_take_host(self, held: Held, num_bytes: int) -> bool:
        """Count host bytes for a generation, whose copies of others go if need be."""
        missing = self.host_bytes - held.host_bytes + num_bytes - self.host_budget
        going = []
        for other in self._host.values():
            if missing <= 0:
                break
            if other is not held and other.job is Job.NONE:
                going.append(other)
                missing -= other.host_bytes
        if missing > 0:
            return False
        for other in going:
            self.free_host(other)
        self.host_bytes += num_bytes - held.host_bytes
        held.host_bytes = num_bytes
        self._host[held.generation] = held
        return True

    def free_host(self, held: Held) -> None:
        """Forget the host tier's copy of a generation, if there is one."""
        held.adapter = None
        self.host_bytes -= held.host_bytes
        held.host_bytes = 0
        self._host.pop(held.generation, None)

    def check_integrity(self, known: dict[str, Held]) -> None:
        """Raise AssertionError unless bytes are the sums of what lies there, within the budgets."""
        assert self._device == {g: h for g, h in known.items() if h.on_device}
        assert self.device_bytes == sum(h.device_bytes for h in self._device.values())
        assert 0 <= self.device_bytes <= self.device_budget, "device bytes beyond the budget"
        assert self._host == {g: h for g, h in known.items() if h.host_bytes or h.adapter}
        assert self.host_bytes == sum(h.host_bytes for h in self._host.values())
        assert 0 <= self.host_bytes <= self.host_budget, "host bytes beyond the budget"
        for held in known.values():
            assert held.is_placed or not held.leases, "a lease on freed memory"
            assert held.on_device or not held.claims, "a claim without bytes"
            assert held.on_device or not held.is_placed
