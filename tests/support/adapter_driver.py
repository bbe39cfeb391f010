"""Runs an executor on prompts that have adapters: the logits of every row, alone and in a mix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from support.step_driver import StepDriver, Track

from plait.adapters.adapter import Adapter
from plait.adapters.loading import load_adapter
from plait.platform.batch import AdapterSegment, StepBatch
from plait.platform.core import AdapterUse
from plait.platform.model.executor import TorchExecutor


@dataclass
class AdapterTrack(Track):
    """A sequence with adapters; its `logprobs` are plain logits."""

    uses: tuple[AdapterUse, ...] = ()


class AdapterDriver(StepDriver):
    """A step driver whose batches say which rows have which adapters."""

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def _batch(self, tracks: Sequence[Track], counts: Sequence[int]) -> StepBatch:
        starts = [t.num_computed for t in tracks]
        batch = super()._batch(tracks, counts)
        ends = batch.query_start[1:].tolist()
        segments = [
            AdapterSegment(first, end, use.generation, use.scale)
            for track, start, count, end in zip(tracks, starts, counts, ends, strict=True)
            for use in getattr(track, "uses", ())
            for first in [end - count + max(0, use.active_from - start)]
            if first < end
        ]
        return replace(batch, adapter_segments=tuple(segments))


def place(executor: TorchExecutor, directory: Path, generation: str) -> Adapter:
    """The adapter of a directory, read and placed on the executor."""
    adapter = load_adapter(
        generation, directory, executor.sites, max_rank=256, base_weight=executor.base_weight
    )
    executor.place_adapter(adapter)
    return adapter


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 300, (length,), generator=generator).tolist()


def run(
    executor: TorchExecutor, tracks: Sequence[AdapterTrack], *, chunk: int = 64, seed: int = 0
) -> list[torch.Tensor]:
    """Logits of all rows of each track, once each has put out its tokens.

    In a mix rows are as wide as the widest of their step: cut to the first row's.
    """
    AdapterDriver(executor, seed=seed).run(tracks, chunk=chunk)
    return [
        torch.nn.utils.rnn.pad_sequence(track.logprobs, batch_first=True, padding_value=-torch.inf)
        for track in tracks
    ]
