"""The engine's memory of generations: loads, placements, evictions, pins, drops.

All calls come from the engine's thread. Whatever takes long runs on the loader's threads, and its
outcome takes effect in `begin`. Who needs a generation on the device reserves its bytes first
(`bring`), so that what is on its way is never more than fits; `claims` decides who may.

A generation is known from `load` until `drop`, and after that as long as a sequence uses it. What
was evicted comes back from the host tier's copy, or from the same directory: the same bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from plait.adapters.info import AdapterInfo, AdapterState
from plait.adapters.loader import Loader, Outcome
from plait.adapters.tiers import Held, Job, Tiers
from plait.platform.errors import (
    AdapterBytesExceeded,
    AdapterError,
    AdapterNotFound,
    AdapterStorageFailed,
    PlaitError,
)
from plait.platform.messages import AdapterLoaded, LoadAdapter

if TYPE_CHECKING:
    from plait.adapters.adapter import Adapter

log = logging.getLogger(__name__)


class Places(Protocol):
    """What the pool needs of an executor."""

    def adapter_bytes(self, adapter: Adapter) -> int:
        """See `executor.Executor`."""

    def place_adapter(self, adapter: Adapter) -> None:
        """See `executor.Executor`."""

    def remove_adapter(self, generation: str) -> None:
        """See `executor.Executor`."""


class Load(Protocol):
    """Reads an adapter; called on a thread of the loader."""

    def __call__(self, generation: str, directory: Path, *, allow_zero_delta: bool) -> Adapter:
        """See `loading.load_adapter`."""


class AdapterPool:
    """All generations that one engine knows."""

    def __init__(
        self,
        executor: Places,
        load: Load,
        *,
        device_bytes: int,
        host_bytes: int,
        loader: Loader | None = None,
    ) -> None:
        self._executor = executor
        self._load = load
        self._loader = loader or Loader()
        self.tiers = Tiers(
            device_budget=device_bytes, host_budget=host_bytes, remove=executor.remove_adapter
        )
        self.known: dict[str, Held] = {}
        self._pinned: dict[str, Held] = {}
        self._queue: deque[Held] = deque()  # to be loaded, once there is room
        self._answers: list[AdapterLoaded] = []
        self._failures: list[tuple[str, PlaitError]] = []
        self._changed = False  # since `states` was asked
        self.promised_bytes = 0  # of the device, kept free by `claims`
        self.num_loads = 0
        self.load_seconds = 0.0
        self.num_placements = 0
        self.placement_seconds = 0.0

    # --- what the API process asks ---------------------------------------------------------------

    def load(self, message: LoadAdapter) -> None:
        """Know a generation; `take_answers` will have the answer.

        One that would never fit is refused with the numbers. A pinned one is answered once it is
        on the device, another once it is read and checked.
        """
        held = self.known.get(message.generation)
        if held is None:
            self._open(message)
            return
        held.dropped = False
        held.num_asked += 1
        if held.info is None:
            self._set_pinned(held, held.pinned or message.pinned)
        elif message.pinned and not held.pinned:
            try:
                self.pin(held.generation, pinned=True)
            except AdapterError as error:
                self._answer_all(held, error)
        self._answer_if_ready(held)

    def pin(self, generation: str, *, pinned: bool) -> None:
        """Keep a generation on the device, or let it be evicted again.

        Raises `AdapterNotFound`, and `AdapterBytesExceeded` where the pinned would not fit.
        """
        held = self.known.get(generation)
        if held is None or held.dropped:
            raise AdapterNotFound(f"no adapter of generation {generation[:12]} is loaded")
        if held.info is not None and pinned and not held.pinned:
            self._check_pin(held)
        self._set_pinned(held, pinned)
        self._answer_if_ready(held)

    def drop(self, generation: str) -> None:
        """Forget a generation once nothing uses it; an unknown one is no error."""
        held = self.known.get(generation)
        if held is not None:
            held.dropped, held.promised = True, False
            self._set_pinned(held, False)
            self._forget_if_unused(held)

    def take_answers(self) -> list[AdapterLoaded]:
        """Answers to `load` since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def take_states(self) -> dict[str, AdapterState] | None:
        """How all loaded generations stand; None where nothing changed since the last call."""
        if not self._changed:
            return None
        self._changed = False
        return {g: held.state for g, held in self.known.items() if held.info is not None}

    # --- for who needs generations on the device -------------------------------------------------

    def begin(self) -> None:
        """Let what the loader finished take effect."""
        for outcome in self._loader.take():
            held = self.known[outcome.generation]
            held.job = Job.NONE
            self.changed()
            if outcome.is_load:
                self._loaded(held, outcome)
            else:
                self._placed(held, outcome)
            self._forget_if_unused(held)
        self._start_loads()

    def take_failures(self) -> list[tuple[str, PlaitError]]:
        """Generations that could not be brought to the device, with the reason."""
        failures, self._failures = self._failures, []
        return failures

    def get(self, generation: str) -> Held:
        """A generation that requests may use. Raises `AdapterNotFound`."""
        held = self.known.get(generation)
        if held is None or held.info is None:
            raise AdapterNotFound(f"no adapter of generation {generation[:12]} is loaded")
        return held

    def check_fits(self, generations: Iterable[str]) -> None:
        """Raise `AdapterBytesExceeded` unless these fit the device together, beside the pinned."""
        helds = [self.get(generation) for generation in generations]
        needed = sum(held.device_bytes for held in helds if not held.pinned)
        pinned, budget = self._pinned_bytes(), self.tiers.device_budget
        if needed + pinned > budget:
            raise AdapterBytesExceeded(
                f"{len(helds)} adapter(s) need {needed:,} bytes at once, and adapters have "
                f"{budget:,}, of which {pinned:,} are pinned: use fewer, unpin others, or serve "
                "with more --adapter-memory"
            )

    def bring(self, held: Held) -> None:
        """Take bytes, which are free, for a generation and begin to place it there."""
        self.tiers.take_device(held)
        self._go_on(held)

    def changed(self) -> None:
        """Note that somebody may get room now, and that states differ."""
        self._changed = True
        self.tiers.num_changes += 1

    def unused(self, held: Held) -> None:
        """A lease or claim of a generation has ended."""
        self.changed()
        if held.on_device and not held.is_placed and not held.pinned and not held.in_use:
            self._call_off(held)
        self._forget_if_unused(held)

    def pins_to_place(self) -> list[Held]:
        """Pinned generations that are not on the device, nor on their way there."""
        helds = self._pinned.values()
        return [held for held in helds if held.info is not None and not held.on_device]

    @property
    def busy(self) -> bool:
        """Whether an answer is still owed, or a job under way."""
        under_way = self._loader.num_jobs > 0 or bool(self._queue) or bool(self.pins_to_place())
        return under_way or bool(self._answers)

    @property
    def figures(self) -> dict[str, Any]:
        """Gauges and counters, by their names in `messages.Stats`."""
        return {
            "adapter_loads": self.num_loads,
            "adapter_load_seconds": self.load_seconds,
            "adapter_placements": self.num_placements,
            "adapter_placement_seconds": self.placement_seconds,
            "adapter_evictions": self.tiers.num_evictions,
            "adapter_host_bytes": self.tiers.host_bytes,
            "adapter_device_bytes": self.tiers.device_bytes,
        }

    def wait(self, timeout_s: float) -> None:
        """Sleep until the loader has finished something, or the time is over."""
        self._loader.wait(timeout_s)

    def close(self) -> None:
        """Begin no further job."""
        self._loader.close()

    def check_integrity(self) -> None:
        """Raise AssertionError unless bytes are sums, within budgets, and jobs make sense."""
        self.tiers.check_integrity(self.known)
        assert self._pinned_bytes() <= self.tiers.device_budget, "pins beyond the budget"
        queued = {held.generation for held in self._queue}
        assert len(queued) == len(self._queue), "queued twice"
        for generation, held in self.known.items():
            assert (held.job is Job.QUEUED) == (generation in queued)
            assert held.job is not Job.PLACING or held.adapter is not None
            assert held.pinned == (generation in self._pinned)
            needed = held.in_use or held.waiting or held.job is not Job.NONE
            assert needed or not held.dropped, "kept in vain"
            if held.on_device and not held.is_placed:
                assert held.job is not Job.NONE, "bytes for nothing"
            if held.info is None:
                assert held.job in {Job.QUEUED, Job.LOADING}, "never read"

    # --- jobs ------------------------------------------------------------------------------------

    def _open(self, message: LoadAdapter) -> None:
        directory = Path(message.directory)
        try:
            load_bytes = sum(_num_bytes(path) for path in directory.iterdir())
        except OSError:
            error = AdapterStorageFailed("the stored adapter cannot be read; load it again")
            self._answer(message.generation, error)
            return
        held = Held(
            generation=message.generation,
            directory=directory,
            allow_zero_delta=message.allow_zero_delta,
            load_bytes=load_bytes,
            num_asked=1,
        )
        self.known[held.generation] = held
        self._set_pinned(held, message.pinned)
        self._enqueue(held)
        self._start_loads()

    def _enqueue(self, held: Held) -> None:
        held.job = Job.QUEUED
        self._queue.append(held)

    def _start_loads(self) -> None:
        """Load what is queued, as far as the host tier has room: in order, so that all come."""
        while self._queue:
            held = self._queue[0]
            too_large = held.load_bytes > self.tiers.host_budget
            if not too_large and not self.tiers.try_take_host(held, held.load_bytes):
                return
            self._queue.popleft()
            held.job = Job.NONE
            if too_large:
                self._failed(held, self._too_large(held, held.load_bytes, "host-memory"))
                self._forget_if_unused(held)
                continue
            held.job = Job.LOADING
            self._loader.load(
                held.generation,
                partial(
                    _load_and_measure,
                    self._load,
                    self._executor,
                    held.generation,
                    held.directory,
                    allow_zero_delta=held.allow_zero_delta,
                ),
            )

    def _loaded(self, held: Held, outcome: Outcome) -> None:
        adapter, error = outcome.adapter, outcome.error
        self.num_loads += adapter is not None
        self.load_seconds += outcome.seconds
        if adapter is not None and held.info is not None and _differ(adapter.info, held.info):
            error = AdapterStorageFailed("the stored adapter is not what it was; load it again")
        if adapter is None or error is not None:
            assert error is not None
            self.tiers.free_host(held)
            self._failed(held, error)
            return
        held.load_bytes = max(held.load_bytes, adapter.info.num_bytes)
        if not self.tiers.try_take_host(held, adapter.info.num_bytes):
            # It is larger than its files: it comes again when there is room for that.
            self.tiers.free_host(held)
            self._enqueue(held)
            return
        held.adapter = adapter
        is_first, held.info = held.info is None, adapter.info
        if is_first:
            try:
                self._check_new(held)
            except AdapterError as refusal:
                self._refuse(held, refusal)
                return
            if not held.pinned and held.device_bytes <= self._room():
                self.bring(held)  # its first request will not have to wait
        elif held.on_device:
            self._go_on(held)
        self._answer_if_ready(held)

    def _room(self) -> int:
        return self.tiers.device_free - self.promised_bytes

    def _go_on(self, held: Held) -> None:
        """Do the next thing for a generation that is on its way to the device."""
        if held.job is not Job.NONE:
            return
        if held.adapter is None:
            self._enqueue(held)
            self._start_loads()
            return
        held.job = Job.PLACING
        self.tiers.use(held)
        self._loader.place(held.generation, partial(self._executor.place_adapter, held.adapter))

    def _placed(self, held: Held, outcome: Outcome) -> None:
        self.placement_seconds += outcome.seconds
        if outcome.error is not None:
            self._failed(held, outcome.error)
            return
        self.num_placements += 1
        held.is_placed = True
        self.tiers.use(held)
        self._answer_if_ready(held)

    def _call_off(self, held: Held) -> None:
        """Nobody wants it on the device any more. What runs goes on; it may be wanted again."""
        if held.job is Job.QUEUED and held.info is not None and not held.num_asked:
            self._queue.remove(held)
            held.job = Job.NONE
        if held.job is not Job.PLACING:
            self.tiers.free_device(held)

    def _failed(self, held: Held, error: PlaitError) -> None:
        """It could not be read or placed. Unless it was promised to somebody, it goes."""
        self.tiers.free_device(held)
        self._failures.append((held.generation, error))
        if not held.promised:
            self._refuse(held, error)
        elif held.num_asked:  # for a pin that it did not have
            self._answer_all(held, error)
            self._set_pinned(held, False)

    def _refuse(self, held: Held, error: PlaitError) -> None:
        self._answer_all(held, error)
        held.dropped = True
        self._set_pinned(held, False)

    def _forget_if_unused(self, held: Held) -> None:
        if not held.dropped or held.in_use or held.waiting:
            return
        if held.job in {Job.LOADING, Job.PLACING} or self.known.get(held.generation) is not held:
            return
        if held.job is Job.QUEUED:
            self._queue.remove(held)
            held.job = Job.NONE
        self._answer_all(held, AdapterNotFound("the adapter was unloaded while it was loaded"))
        self.tiers.free_device(held)
        self.tiers.free_host(held)
        del self.known[held.generation]
        self.changed()

    # --- answers and bounds ----------------------------------------------------------------------

    def _answer(self, generation: str, outcome: AdapterInfo | PlaitError) -> None:
        if isinstance(outcome, PlaitError):
            self._answers.append(
                AdapterLoaded(
                    generation=generation,
                    error=(outcome.code, outcome.message),
                    report=getattr(outcome, "report", None),
                )
            )
        else:
            self._answers.append(AdapterLoaded(generation=generation, info=outcome))

    def _answer_all(self, held: Held, outcome: AdapterInfo | PlaitError) -> None:
        for _ in range(held.num_asked):
            self._answer(held.generation, outcome)
        held.num_asked = 0

    def _answer_if_ready(self, held: Held) -> None:
        """Answer who asked, unless a placement that belongs to the answer is still to come."""
        if held.info is None or not held.num_asked:
            return
        if held.is_placed or not (held.pinned or held.job is Job.PLACING):
            self._answer_all(held, held.info)
            held.promised = True

    def _check_new(self, held: Held) -> None:
        if held.device_bytes > self.tiers.device_budget:
            raise self._too_large(held, held.device_bytes, "memory")
        if held.pinned:
            self._check_pin(held)

    def _check_pin(self, held: Held) -> None:
        pinned, budget = self._pinned_bytes(beside=held), self.tiers.device_budget
        if pinned + held.device_bytes > budget:
            raise AdapterBytesExceeded(
                f"pinning this adapter of {held.device_bytes:,} bytes does not fit: adapters have "
                f"{budget:,}, of which {pinned:,} are pinned already. Unpin others, or serve with "
                "more --adapter-memory"
            )

    def _too_large(self, held: Held, num_bytes: int, flag: str) -> AdapterBytesExceeded:
        host = flag == "host-memory"
        budget = self.tiers.host_budget if host else self.tiers.device_budget
        return AdapterBytesExceeded(
            f"the adapter takes {num_bytes:,} bytes, and {'the host tier of ' if host else ''}"
            f"adapters have {budget:,}: serve with --adapter-{flag} {num_bytes} or more",
            report=None if held.info is None else held.info.report,
        )

    def _set_pinned(self, held: Held, pinned: bool) -> None:
        held.pinned = pinned
        if pinned:
            self._pinned[held.generation] = held
        else:
            self._pinned.pop(held.generation, None)
        self.changed()

    def _pinned_bytes(self, *, beside: Held | None = None) -> int:
        return sum(
            held.info.device_bytes
            for held in self._pinned.values()
            if held is not beside and held.info is not None
        )


def _num_bytes(path: Path) -> int:
    """Of a file, or of those in a folder."""
    inside = path.iterdir() if path.is_dir() else (path,)
    return sum(each.stat().st_size for each in inside)


def _differ(one: AdapterInfo, other: AdapterInfo) -> bool:
    """Whether these cannot be of one content."""
    facts = [(i.device_bytes, i.num_bytes, i.kv_digest, i.tower_digest) for i in (one, other)]
    return facts[0] != facts[1]


def _load_and_measure(
    load: Load, executor: Places, generation: str, directory: Path, *, allow_zero_delta: bool
) -> Adapter:
    adapter = load(generation, directory, allow_zero_delta=allow_zero_delta)
    info = replace(adapter.info, device_bytes=executor.adapter_bytes(adapter))
    return replace(adapter, info=info)
