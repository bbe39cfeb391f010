"""A scheduler's world whose prompts have images, with the real vision strand over a fake tower.

An embedding tells which image it is of, which row, and what adapters did to it.
"""

from __future__ import annotations

import torch
from support.scheduler_world import World
from support.schedulers import make_scheduler

from plait.platform.batch import build
from plait.platform.config import VisionInfo
from plait.platform.core import ImageItem
from plait.vision.encoder_cache import EncoderCache
from plait.vision.strand import VisionStrand

IMAGE, BREAK = 11, 10  # tokens
ROW_BYTES = 16  # four floats: image, row, adapters
CONTENTS: dict[str, tuple[tuple[int, int], ...]] = {
    "k0": ((0, 1),),
    "k1": ((0, 4),),
    "k2": ((0, 4),),
    "k3": ((0, 3), (4, 3), (8, 3)),
    "k4": ((1, 9),),
    "k5": ((0, 17),),
    "k6": ((2, 2), (7, 1)),
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
        items.append(ImageItem(key=part, start=start, num_tokens=length, embedded=runs, tensors={}))
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

    def __init__(
        self, *, bidirectional="", capacity=1000, max_step_rows=8, moods=(), sizes, **rest
    ):
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
        alike = {(s.sequence.request.cache_salt, s.sequence.request.adapters) for s in plan.spans}
        # An adapter that becomes active in between makes two of what is one image otherwise.
        late = any(use.active_from for _, uses in alike for use in uses)
        if made and len(alike) == 1 and not late:
            assert len(set(made[0])) == len(made[0]), "an image is encoded twice"
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
        self.strand.check_integrity(self.scheduler._sequences.running)
