"""Drives an executor with hand-made step batches: chunks and decodes mixed, blocks scattered.

No scheduler, no sampler: what a test of an executor alone needs. Sequences start at different
steps, prompts go in chunks of 7, and each step computes all of them in one batch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from plait.platform.batch import StepBatch
from plait.platform.config import CacheConfig
from plait.platform.executor import Executor

BLOCK_SIZE = 4


@dataclass
class Track:
    """One sequence: what it has, what is computed, and what came out."""

    tokens: list[int]
    num_output: int
    start_step: int = 0
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)  # per KV group
    output: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)  # of every computed row
    hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.output) >= self.num_output


class StepDriver:
    """Owns the blocks of an executor's cache and runs tracks to their end."""

    def __init__(
        self,
        executor: Executor,
        *,
        num_blocks: int = 256,
        seed: int = 0,
        kv_dtype: str | None = None,
    ) -> None:
        self.executor = executor
        groups = tuple(replace(g, num_blocks=num_blocks) for g in executor.kv_groups)
        executor.allocate(
            CacheConfig(
                block_size=BLOCK_SIZE,
                groups=groups,
                dtype=kv_dtype or executor.kv_dtype,
                enable_prefix_caching=False,
            )
        )
        shuffle = random.Random(seed).shuffle
        self.free = [list(range(1, num_blocks)) for _ in groups]
        for blocks in self.free:
            shuffle(blocks)

    def run(self, tracks: Sequence[Track], *, chunk: int = 7) -> None:
        """Run all tracks to their end, greedily; finished ones free their blocks."""
        step = 0
        while not all(t.done for t in tracks):
            active = [t for t in tracks if t.start_step <= step and not t.done]
            if active:
                self.step(active, chunk)
            step += 1

    def step(self, tracks: Sequence[Track], chunk: int) -> None:
        """Compute up to `chunk` tokens of every track; sample where the prompt is complete."""
        counts = [min(chunk, len(t.tokens) - t.num_computed) for t in tracks]
        batch = self._batch(tracks, counts)
        self._take(tracks, counts, batch, self.executor.forward(batch))

    def _take(
        self, tracks: Sequence[Track], counts: Sequence[int], batch: StepBatch, hidden: torch.Tensor
    ) -> None:
        """Keep what the step made of each track's rows, and sample."""
        logits = self.executor.logits(hidden, np.arange(len(batch.token_ids)))
        logprobs = self._scores(logits)
        for track, count, end in zip(tracks, counts, batch.query_start[1:], strict=True):
            rows = slice(int(end) - count, int(end))
            track.logprobs.extend(logprobs[rows])
            track.hidden.extend(hidden[rows])
            track.num_computed += count
            if track.num_computed == len(track.tokens):
                token = int(logits[int(end) - 1].argmax())
                track.output.append(token)
                track.tokens.append(token)
            if track.done:
                for free, blocks in zip(self.free, track.blocks, strict=True):
                    free.extend(blocks)

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """What tracks keep of each row."""
        return logits.log_softmax(-1)

    def _batch(self, tracks: Sequence[Track], counts: Sequence[int]) -> StepBatch:
        positions = [
            np.arange(t.num_computed, t.num_computed + n)
            for t, n in zip(tracks, counts, strict=True)
        ]
        ends = [t.num_computed + n for t, n in zip(tracks, counts, strict=True)]
        for track, end in zip(tracks, ends, strict=True):
            self._grow(track, end)
        tables, slots = [], []
        for group in range(len(self.free)):
            owned = [np.array(t.blocks[group], dtype=np.int32) for t in tracks]
            table = np.zeros((len(tracks), max(len(b) for b in owned)), dtype=np.int32)
            for row, blocks in zip(table, owned, strict=True):
                row[: len(blocks)] = blocks
            tables.append(table)
            slots.append(
                np.concatenate(
                    [
                        b[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                        for b, p in zip(owned, positions, strict=True)
                    ]
                ).astype(np.int64)
            )
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ids = [
            t.tokens[t.num_computed : t.num_computed + n]
            for t, n in zip(tracks, counts, strict=True)
        ]
        nothing = np.empty(0, dtype=np.int64)
        return StepBatch(
            token_ids=np.concatenate(ids).astype(np.int64),
            positions=np.concatenate(positions).astype(np.int64),
            query_start=starts,
            seq_lens=np.array(ends, dtype=np.int32),
            slot_mapping=tuple(slots),
            block_tables=tuple(tables),
            sample_rows=nothing,
            sample_start=np.zeros(len(tracks) + 1, dtype=np.int32),
            image_rows=nothing,
        )

    def _grow(self, track: Track, end: int) -> None:
        track.blocks = track.blocks or [[] for _ in self.free]
        for free, blocks in zip(self.free, track.blocks, strict=True):
            while len(blocks) * BLOCK_SIZE < end:
                blocks.append(free.pop())
