"""Random lives of a scheduler with images: every row gets its own embedding, and all end.

The world of `support.scheduler_world` runs each plan on a simulated KV cache, with the real vision
strand over a tower that tells in each embedding which image it is of, and what adapters did to it.
"""

import contextlib
import os
import random

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.scheduler_world import MoodyStrand, World, make_scheduler

from plait.platform.batch import build
from plait.platform.config import VisionInfo
from plait.platform.core import AdapterUse, ImageItem
from plait.platform.errors import ContextLengthExceeded, ImageTooLarge, Overloaded
from plait.vision.encoder_cache import EncoderCache
from plait.vision.strand import VisionStrand

EXAMPLES = int(os.environ.get("PLAIT_TEST_EXAMPLES", "1"))
IMAGE, BREAK = 11, 10  # tokens
ROW_BYTES = 16  # four floats: image, row, adapters
CONTENTS = {f"k{i}": runs for i, runs in enumerate([
    ((0, 1),), ((0, 4),), ((0, 4),), ((0, 3), (4, 3), (8, 3)), ((1, 9),), ((0, 17),), ((2, 2), (7, 1)),
])}  # fmt: skip
ADAPTERS = {
    "language": {"kv_digest": "k"},
    "tower": {"tower_digest": "t"},
    "both": {"kv_digest": "b", "tower_digest": "b"},
}


def vision(bidirectional: str) -> VisionInfo:
    return VisionInfo(
        family="f", hidden_size=4, num_levels=1, image_token_id=IMAGE, has_grid_positions=False,
        bidirectional=bidirectional,
    )  # fmt: skip


def place(layout, bidirectional):
    """Prompt and fields of a request; an image's range begins and ends as its content wants."""
    tokens, items, spans = [], [], []
    for part in layout:
        if isinstance(part, int):
            tokens.append(part)
            continue
        runs, start = CONTENTS[part], len(tokens)
        length = sum(runs[-1])
        inside = [BREAK] * length
        for at, count in runs:
            inside[at : at + count] = [IMAGE] * count
            spans.append((start + at, start + at + count))
        tokens += inside
        items.append(
            ImageItem(key=part, start=start, num_tokens=length, embedded=runs, tensors={})
        )
    fields = {"images": tuple(items)}
    if items and bidirectional == "image":
        fields["spans"] = tuple(spans)
    if items and bidirectional == "prefix":
        fields["spans"] = ((0, len(tokens)),)
        fields["vision_digest"] = f"{tokens}{[(i.key, i.start) for i in items]}"
    return tokens, fields


def embedding(key: str, row: int, uses) -> list[float]:
    towers = [(u.tower_digest, u.scale) for u in uses if u.tower_digest]
    code = hash(tuple(towers)) % 1000 if towers else 0
    return [float(key[1:]), float(row), float(code), 0.0]


class Tower:
    """Implements what the strand needs of an executor."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.broken: set[str] = set()

    def encode(self, items, adapters=()):
        self.calls.append([item.key for item in items])
        uses = adapters or [()] * len(items)
        return [
            torch.tensor([
                embedding(item.key, row, [u for u in of_one if u.active_from <= item.start])
                for row in range(item.num_embeds)
            ])
            for item, of_one in zip(items, uses, strict=True)
        ]  # fmt: skip


class ImageWorld(World):
    """`World` whose steps have embeddings."""

    def __init__(self, *, bidirectional="", capacity=1000, max_step_rows=8, moods=(), sizes, **rest):
        self.tower = Tower()
        self.cache = EncoderCache(capacity)
        self.strand = VisionStrand(
            self.tower, vision(bidirectional), self.cache, bytes_per_row=ROW_BYTES,
            max_step_rows=max_step_rows,
        )  # fmt: skip
        strands = (self.strand, *moods)
        super().__init__(make_scheduler(*sizes, strands=strands, **rest))
        self.bidirectional = bidirectional
        self.max_step_rows = max_step_rows

    def ask(self, layout, adapters=(), **rest):
        tokens, fields = place(layout, self.bidirectional)
        return self.add(tokens, adapters=adapters, fields=fields, **rest)

    def execute(self, plan):
        super().execute(plan)
        if not plan.spans:
            return
        num_calls = len(self.tower.calls)
        embeds = self.strand.embeds(plan)
        made = self.tower.calls[num_calls:]
        assert len(made) <= 1
        assert len(set(made[0])) == len(made[0]) if made and not self._adapted(plan) else True
        batch = build(plan, self.block_size)
        wanted, rows = [], []
        for span, first in zip(plan.spans, batch.query_start.tolist(), strict=False):
            request = span.sequence.request
            for item in request.images:
                uses = [u for u in request.adapters if u.active_from <= item.start]
                row = 0
                for at, length in item.embedded:
                    for position in range(item.start + at, item.start + at + length):
                        if span.start <= position < span.start + span.num_tokens:
                            rows.append(first + position - span.start)
                            wanted.append(embedding(item.key, row, uses))
                        row += 1
        assert batch.image_rows.tolist() == rows
        assert (embeds is None and not wanted) or embeds.tolist() == wanted
        for s, start, end in batch.ranges.tolist():
            assert 0 <= start < end <= batch.seq_lens[s]
        self.strand.check_integrity(self.scheduler._running)

    @staticmethod
    def _adapted(plan):
        return any(span.sequence.request.adapters for span in plan.spans)


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
    max_examples=60 * EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
TestImageLives = ImageLives.TestCase
