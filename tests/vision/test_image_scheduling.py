"""Random lives of a scheduler with images: every row gets its own embedding, and all end."""

import contextlib
import os
import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.image_world import CONTENTS, ROW_BYTES, ImageWorld
from support.moody_strand import MoodyStrand

from plait.platform.core import AdapterUse
from plait.platform.errors import ContextLengthExceeded, ImageTooLarge, Overloaded

EXAMPLES = int(os.environ.get("PLAIT_TEST_EXAMPLES", "1"))
ADAPTERS = {
    "language": {"kv_digest": "k"},
    "tower": {"tower_digest": "t"},
    "both": {"kv_digest": "b", "tower_digest": "b"},
}
LAYOUTS = st.lists(
    st.integers(1, 3) | st.sampled_from(sorted(CONTENTS)), min_size=1, max_size=7
).filter(lambda layout: any(isinstance(part, int) for part in layout))
USES = st.lists(
    st.builds(
        lambda name, scale, active_from: AdapterUse(
            generation=name, scale=scale, active_from=active_from, **ADAPTERS[name]
        ),
        st.sampled_from(sorted(ADAPTERS)),
        st.sampled_from([1.0, 0.5]),
        st.sampled_from([0, 0, 2, 9]),
    ),
    max_size=2,
    unique_by=lambda use: use.generation,
).map(tuple)
GROUPS = {"full": [None], "sliding": [5], "full and sliding": [None, 6]}


class ImageLives(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from(sorted(GROUPS)),
        blocks=st.lists(st.integers(4, 40), min_size=2, max_size=2),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        budget=st.sampled_from([1, 2, 5, 16, 64]),
        max_num_seqs=st.integers(1, 6),
        bidirectional=st.sampled_from(["", "image", "prefix"]),
        rows=st.sampled_from([17, 20, 34, 200]),
        max_step_rows=st.sampled_from([1, 4, 9, 100]),
        draft_seed=st.none() | st.integers(0, 9),
        moods=st.lists(st.integers(0, 9), max_size=1),
    )
    def begin(self, windows, blocks, rows, draft_seed, moods, **config):
        self.world = ImageWorld(
            sizes=tuple(zip(GROUPS[windows], blocks, strict=False)),
            capacity=rows * ROW_BYTES,
            moods=[MoodyStrand(random.Random(seed)) for seed in moods],
            max_model_len=90,
            **config,
        )
        self.rng = None if draft_seed is None else random.Random(draft_seed)

    @rule(
        layout=LAYOUTS,
        n=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.integers(0, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "a"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        adapters=USES,
    )
    def add(self, layout, **rest):
        with contextlib.suppress(ContextLengthExceeded, Overloaded, ImageTooLarge):
            self.world.ask(layout, **rest)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            self.world.step(rng=self.rng)

    @rule()
    @precondition(lambda self: self.world.live)
    def fail_one(self):
        self.world.step(rng=self.rng, fails=True)

    @rule(data=st.data())
    @precondition(lambda self: self.world.live)
    def abort(self, data):
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.live))))
        self.world.check()

    @rule()
    @precondition(lambda self: self.world.live)
    def drop_a_plan(self):
        self.world.plan()
        self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain(self.rng)
            assert not self.world.strand._held
            assert not self.world.cache.num_computing_rows
            self.world.cache.check_integrity(())


ImageLives.TestCase.settings = settings(
    max_examples=50 * EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestImageLives = ImageLives.TestCase
