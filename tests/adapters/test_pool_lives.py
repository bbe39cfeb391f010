"""Random lives of the pool and its strand, under a scheduler, with loads that end when they please.

`PLAIT_TEST_EXAMPLES=20` runs twenty times as many.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.adapter_world import DEVICE, HOST, AdapterWorld

from plait.platform.core import AdapterUse
from plait.platform.errors import AdapterError

EXAMPLES = int(os.environ.get("PLAIT_TEST_EXAMPLES", "1"))
NAMES = [f"g{i}" for i in range(12)]


class PoolLives(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 6),
        budget=st.sampled_from([2, 8, 64]),
        sizes=st.lists(st.integers(3, 16), min_size=8, max_size=8),
    )
    def begin(self, slots, budget, sizes):
        self.root = Path(tempfile.mkdtemp())
        self.world = AdapterWorld(self.root, max_num_seqs=slots, budget=max(budget, slots))
        self.loaded, self.asked, self.sizes = {}, {}, {}
        for name, size in zip(NAMES, sizes, strict=False):
            self.load(name=name, size=size, pinned=False)
        while self.world.loads.jobs:
            self.world.loads.run()
            self.world.step()
        self.take_answers()

    # What the API process does: it names only what is loaded, and drops what nobody names.

    @rule(
        name=st.sampled_from(NAMES),
        size=st.integers(1, 12),
        pinned=st.sampled_from([False] * 5 + [True]),
    )
    def load(self, name, size, pinned):
        size = self.sizes.setdefault(name, size)  # a generation never changes
        message = self.world.files.write(name, device_bytes=size, broken=name == "g11")
        message.pinned = pinned
        self.world.pool.load(message)
        self.asked[name] = self.asked.get(name, 0) + 1
        self.take_answers()

    @rule(size=st.integers(DEVICE + 1, HOST))
    def load_one_that_never_fits(self, size):
        message = self.world.files.write("huge", device_bytes=size)
        self.world.pool.load(message)
        self.asked["huge"] = self.asked.get("huge", 0) + 1

    def take_answers(self):
        for answer in self.world.pool.take_answers():
            name = answer.generation
            self.asked[name] -= 1
            if not self.asked[name]:
                del self.asked[name]
            if answer.info is not None:
                assert name != "huge"
                assert answer.info.device_bytes > 0
                self.loaded[name] = answer.info
            elif answer.error[0] == "invalid_lora_adapter":
                assert answer.report.unmatched

    @rule(data=st.data())
    @precondition(lambda self: self.loaded)
    def drop(self, data):
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        if name in self.asked or self.is_named(name):
            return
        self.world.pool.drop(name)
        del self.loaded[name]

    def is_named(self, name):
        return any(
            use.generation == name
            for sequences in self.world.live.values()
            for use in sequences[0].request.adapters
        )

    @rule(data=st.data(), pinned=st.booleans())
    @precondition(lambda self: self.loaded)
    def pin(self, data, pinned):
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        with contextlib.suppress(AdapterError):
            self.world.pool.pin(name, pinned=pinned)

    @rule(
        data=st.data(),
        count=st.integers(1, 3),
        length=st.integers(1, 20),
        n=st.sampled_from([1, 1, 3]),
        max_tokens=st.integers(1, 16),
        priority=st.integers(0, 1),
        tenant=st.sampled_from(["", "x"]),
        timeout_s=st.sampled_from([None, None, 3]),
    )
    @precondition(lambda self: self.loaded)
    def request(self, data, count, length, timeout_s, **rest):
        names = st.lists(st.sampled_from(sorted(self.loaded)), max_size=3, unique=True)
        deadline_s = None if timeout_s is None else self.world.now_s + timeout_s
        prompt = [1 + i % 7 for i in range(length)]
        for chosen in data.draw(st.lists(names, min_size=count, max_size=count)):
            uses = tuple(AdapterUse(generation=g, kv_digest=g) for g in chosen)
            self.world.add(prompt, adapters=uses, deadline_s=deadline_s, ignore_eos=True, **rest)

    @rule(data=st.data())
    @precondition(lambda self: self.world.live)
    def abort(self, data):
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.live))))

    # What the engine and its threads do.

    @rule(times=st.integers(1, 5), seconds=st.sampled_from([0.1, 1.0]))
    def step(self, times, seconds):
        self.world.refusals.add("lora_byte_limit_exceeded")  # pins, or too many at once
        for _ in range(times):
            self.world.step()
            self.world.between_steps()
            self.world.now_s += seconds
        self.take_answers()

    @rule(data=st.data(), place=st.booleans())
    def finish_a_job(self, data, place):
        threads = self.world.placings if place else self.world.loads
        if threads.jobs:
            threads.run(data.draw(st.integers(0, len(threads.jobs) - 1)))

    @rule(name=st.sampled_from(NAMES[:2]), heals=st.sampled_from([False, True, True]))
    def break_a_placement(self, name, heals):
        (set.discard if heals else set.add)(self.world.places.refused, name)

    @rule(data=st.data())
    @precondition(lambda self: self.loaded)
    def lose_a_directory(self, data):
        name = data.draw(st.sampled_from(sorted(self.loaded)[:2]))
        shutil.rmtree(self.root / name, ignore_errors=True)

    @invariant()
    def memory_is_what_it_says(self):
        if hasattr(self, "world"):
            self.world.check_memory()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.refusals.add("lora_byte_limit_exceeded")
        world.drain()
        while world.pool.busy:
            world.between_steps()
            world.step()
            self.take_answers()
        assert not self.asked, "a load without an answer"
        world.check_memory()
        for held in world.pool.known.values():
            assert (held.leases, held.claims, held.dropped) == (0, 0, False)
            assert held.pinned or not held.waiting
        for name in list(world.pool.known):
            world.pool.drop(name)
        world.step()
        assert not world.places.placed, "what was dropped is still placed"
        assert (world.pool.tiers.device_bytes, world.pool.tiers.host_bytes) == (0, 0)
        shutil.rmtree(self.root)


PoolLives.TestCase.settings = settings(
    max_examples=100 * EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPoolLives = PoolLives.TestCase
