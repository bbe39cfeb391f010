"""Random lives of a scheduler, with every step executed on a simulated KV cache.

`PLAIT_TEST_EXAMPLES=20` runs twenty times as many.
"""

import contextlib
import os
import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.histories import VOCAB_SIZE
from support.moody_strand import MoodyStrand
from support.scheduler_world import World
from support.schedulers import make_scheduler

from plait.platform.core import AdapterUse
from plait.platform.errors import ContextLengthExceeded, Overloaded

EXAMPLES = int(os.environ.get("PLAIT_TEST_EXAMPLES", "1"))

# Prompts begin alike more often than chance would have it.
STEMS = [[random.Random(i).randrange(VOCAB_SIZE) for _ in range(40)] for i in range(2)]

# Two generations with one effect on K and V, one with another, one with none.
DIGESTS = {"a": "k", "b": "k", "c": "m", "d": ""}
USES = st.lists(
    st.builds(
        lambda generation, scale, active_from: AdapterUse(
            generation=generation,
            scale=scale,
            active_from=active_from,
            kv_digest=DIGESTS[generation],
        ),
        st.sampled_from(sorted(DIGESTS)),
        st.sampled_from([1.0, 0.5]),
        st.sampled_from([0, 0, 3, 8]),
    ),
    max_size=2,
    unique_by=lambda use: use.generation,
).map(tuple)

GROUPS = {
    "full": [None],
    "sliding": [5],
    "full and sliding": [None, 6],
    "two windows": [3, 11],
    "full and narrowest": [None, 1],
    "full and two windows": [None, 4, 9],
}


class SchedulerLives(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from(sorted(GROUPS)),
        blocks=st.lists(st.integers(2, 24), min_size=3, max_size=3),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        budget=st.sampled_from([1, 2, 5, 16, 64]),
        max_num_seqs=st.integers(1, 6),
        max_num_queued=st.sampled_from([2, 100]),
        watermark=st.sampled_from([0.0, 0.02, 0.2]),
        draft_seed=st.none() | st.integers(0, 9),
        moods=st.lists(st.integers(0, 9), max_size=2),
    )
    def begin(self, windows, blocks, draft_seed, moods, **config):
        config["strands"] = tuple(MoodyStrand(random.Random(seed)) for seed in moods)
        sizes = zip(GROUPS[windows], blocks, strict=False)
        self.world = World(make_scheduler(*sizes, max_model_len=60, **config))
        self.rng = None if draft_seed is None else random.Random(draft_seed)

    @rule(
        stem=st.integers(0, 1),
        length=st.integers(0, 30),
        tail=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4),
        n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.integers(0, 20),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "a"]),
        timeout_s=st.none() | st.integers(1, 30),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        ignore_eos=st.booleans(),
        tenant=st.sampled_from(["", "x", "y"]),
        share=st.sampled_from([1.0, 3.0]),
        adapters=USES,
    )
    def add(self, stem, length, tail, n, timeout_s, **rest):
        deadline_s = None if timeout_s is None else self.world.now_s + timeout_s
        with contextlib.suppress(ContextLengthExceeded, Overloaded):
            self.world.add([*STEMS[stem][:length], *tail], n=n, deadline_s=deadline_s, **rest)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.world.step(rng=self.rng)

    @rule()
    @precondition(lambda self: self.world.live)
    def fail_one(self):
        self.world.step(rng=self.rng, fails=True)

    @rule(data=st.data(), within_step=st.booleans())
    @precondition(lambda self: self.world.live)
    def abort(self, data, within_step):
        victim = data.draw(st.sampled_from(sorted(self.world.live)))
        if within_step:
            plan = self.world.plan()
            if plan is not None:
                self.world.execute(plan)
                self.world.abort(victim)
                self.world.commit(plan)
        else:
            self.world.abort(victim)
        self.world.check()

    @rule()
    @precondition(lambda self: self.world.live)
    def drop_a_plan(self):
        self.world.plan()
        self.world.check()

    @rule(seconds=st.integers(1, 10))
    def let_time_pass(self, seconds):
        self.world.now_s += seconds

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain(self.rng)


SchedulerLives.TestCase.settings = settings(
    max_examples=150 * EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerLives = SchedulerLives.TestCase
