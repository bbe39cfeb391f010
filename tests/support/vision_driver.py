"""Drives an executor with prompts that hold images: `StepDriver`, with embeddings and positions.

An image's embeddings are made once, before its first chunk. A chunk takes the rows that it covers;
one that would cut a bidirectional range is made longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from support.step_driver import StepDriver, Track

from plait.platform.batch import AdapterSegment, StepBatch
from plait.platform.core import AdapterUse, ImageItem


@dataclass(kw_only=True)
class ImageTrack(Track):
    """One sequence whose prompt has images."""

    items: list[ImageItem] = field(default_factory=list)
    positions: torch.Tensor | None = None  # [3, P]
    position_delta: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    adapters: tuple[AdapterUse, ...] = ()
    embeds: dict[int, torch.Tensor] = field(default_factory=dict)  # by position


class VisionDriver(StepDriver):
    """`StepDriver` for `ImageTrack`s."""

    def __init__(self, executor, *, drop_spans: bool = False, **options) -> None:
        super().__init__(executor, **options)
        self.drop_spans = drop_spans  # a negative control

    def run(self, tracks: Sequence[ImageTrack], *, chunk: int = 7) -> None:
        """Encode all images together, then run as `StepDriver` does."""
        owners = [(track, item) for track in tracks for item in track.items]
        if owners:
            uses = [track.adapters for track, _ in owners]
            encoded = self.executor.encode([item for _, item in owners], uses)
            for (track, item), rows in zip(owners, encoded, strict=True):
                at = (item.start + o + i for o, n in item.embedded for i in range(n))
                track.embeds.update(zip(at, rows, strict=True))
        super().run(tracks, chunk=chunk)

    def step(self, tracks: Sequence[ImageTrack], chunk: int) -> None:
        """One step; chunks differ in length where a range would be cut."""
        counts = [self._count(track, chunk) for track in tracks]
        batch = self._batch(tracks, counts)
        rows = [
            track.embeds[position]
            for track, count in zip(tracks, counts, strict=True)
            for position in range(track.num_computed, track.num_computed + count)
            if position in track.embeds
        ]
        hidden = self.executor.forward(batch, torch.stack(rows) if rows else None)
        self._take(tracks, counts, batch, hidden)

    def _count(self, track: ImageTrack, chunk: int) -> int:
        end = min(track.num_computed + chunk, len(track.tokens))
        for start, stop in track.spans:
            if start < end < stop:
                end = stop
        return end - track.num_computed

    def _batch(self, tracks: Sequence[ImageTrack], counts: Sequence[int]) -> StepBatch:
        batch = super()._batch(tracks, counts)
        image_rows, ranges, segments, positions = [], [], [], []
        for span, (track, count) in enumerate(zip(tracks, counts, strict=True)):
            first, start = int(batch.query_start[span]), track.num_computed
            image_rows += [first + i for i in range(count) if start + i in track.embeds]
            if not self.drop_spans:
                ranges += [(span, a, b) for a, b in track.spans if b <= start + count]
            segments += [
                AdapterSegment(first, first + count, use.generation, use.scale)
                for use in track.adapters
            ]
            if track.positions is not None:
                at = torch.arange(start, start + count)
                known = track.positions.shape[1]
                later = (at + track.position_delta).expand(3, -1)
                early = track.positions[:, at.clamp(max=known - 1)]
                positions.append(torch.where(at < known, early, later))
        return replace(
            batch,
            image_rows=np.array(image_rows, dtype=np.int64),
            ranges=np.array(ranges, dtype=np.int32).reshape(-1, 3),
            positions=torch.cat(positions, dim=1).numpy() if positions else batch.positions,
            adapter_segments=tuple(segments),
        )
