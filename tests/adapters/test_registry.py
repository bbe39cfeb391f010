"""Names and leases: whatever happens in whatever order, nothing in use is given away."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from support.fake_engine import make_info

from plait.adapters.composition import last_occurrence
from plait.adapters.registry import AdapterRegistry, Wish
from plait.platform.errors import (
    AdapterAlreadyLoaded,
    AdapterError,
    AdapterGenerationMismatch,
    AdapterLimitExceeded,
    AdapterNotFound,
    InvalidAdapterName,
    InvalidLoadPolicy,
)

MAX_NAMES = 3
names = st.sampled_from(["a", "b", "c", "d", "base"])
generations = st.sampled_from([f"{i:064x}" for i in range(4)])


class Registry(RuleBasedStateMachine):
    """Against a model of two dictionaries: where names point, and who holds what."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.registry = AdapterRegistry(is_served=lambda name: name == "base", max_names=MAX_NAMES)
        self.pointed: dict[str, str] = {}
        self.on_demand: set[str] = set()
        self.held: list = []
        self.loaded: set[str] = set()  # what the engine keeps

    @rule(
        name=names,
        generation=generations,
        replace=st.booleans(),
        expected=st.none() | generations,
        on_demand=st.booleans(),
    )
    def publish(self, name, generation, replace, expected, on_demand):
        wish = Wish(name=name, replace=replace, expected_generation=expected)
        before, current = dict(self.pointed), self.pointed.get(name)
        in_use = {g for lease in self.held for g in lease.generations}
        spare = [n for n in self.on_demand if self.pointed[n] not in in_use]
        hold = self.registry.hold(generation)
        self.loaded.add(generation)
        refused = None
        try:
            self.registry.publish(wish, make_info(generation), on_demand=on_demand)
        except AdapterError as error:
            refused = type(error)
        finally:
            hold.release()
        if refused is not None:
            reasons = {
                InvalidAdapterName: name == "base",
                InvalidLoadPolicy: expected is not None and not replace,
                AdapterGenerationMismatch: expected not in (None, current),
                AdapterAlreadyLoaded: current is not None and not replace,
                AdapterLimitExceeded: current is None and len(before) == MAX_NAMES,
            }
            assert reasons[refused]
            return
        self.pointed[name] = generation
        (self.on_demand.add if on_demand else self.on_demand.discard)(name)
        for gone in self.pointed.keys() - {n.name for n in self.registry.entries()}:
            assert gone in spare or generation == before[gone]
            del self.pointed[gone]
            self.on_demand.discard(gone)

    @rule(name=names)
    def unload(self, name):
        if name in self.pointed:
            assert self.registry.unload(name).generation == self.pointed.pop(name)
            self.on_demand.discard(name)
        else:
            with pytest.raises(AdapterNotFound):
                self.registry.unload(name)

    @rule(target=leases, some=st.lists(names, max_size=2))
    def use(self, some):
        if not all(name in self.pointed for name in some):
            with pytest.raises(AdapterNotFound):
                self.registry.use(some)
            some = []
        lease = self.registry.use(some)
        assert list(lease.generations) == [self.pointed[name] for name in some]
        self.held.append(lease)
        return lease

    @rule(lease=consumes(leases), twice=st.booleans())
    def release(self, lease, twice):
        self.held.remove(lease)
        lease.release()
        if twice:
            lease.release()

    @rule()
    def sweep(self):
        for generation in self.registry.take_unreferenced():
            self.loaded.remove(generation)  # handed out once
        in_use = {g for lease in self.held for g in lease.generations}
        assert self.loaded == in_use | set(self.pointed.values())

    @invariant()
    def names_point_to_what_is_loaded(self):
        entries = {n.name: n.generation for n in self.registry.entries()}
        assert entries == self.pointed
        assert set(entries.values()) <= self.loaded
        assert len(entries) <= MAX_NAMES
        assert {g for lease in self.held for g in lease.generations} <= self.loaded


TestRegistry = Registry.TestCase
TestRegistry.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("tokens", "sought", "found"),
    [
        ((1, 2, 3), (), 0),
        ((1, 2, 1, 2, 3), (1, 2), 2),
        ((1, 1, 1), (1, 1), 1),
        ((1, 2), (1, 2, 3), None),
        ((3, 1), (1, 2), None),
    ],
)
def test_the_last_occurrence_counts(tokens, sought, found):
    assert last_occurrence(tokens, sought) == found
