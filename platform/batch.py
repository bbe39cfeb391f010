"""A plan turned into flat arrays: one line per token row, whatever its role.

Adapter, position and mask belong to rows. No array tells "prefill" from "decode".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.platform.image_rows import image_runs

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from plait.platform.core import Span, StepPlan


@dataclass(frozen=True, slots=True)
class AdapterSegment:
    """Rows `start:end` that one adapter changes. Rows with several adapters are in several."""

    start: int
    end: int
    generation: str
    scale: float


_NO_ROWS, _NO_RANGES = np.zeros(0, np.int64), np.zeros((0, 3), np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Flat numpy arrays of one step: T rows, S spans, R sample rows, G KV groups."""

    token_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], or [3, T] where the model's positions are of a grid
    query_start: np.ndarray  # int32 [S+1]: rows of span s are query_start[s]:query_start[s+1]
    seq_lens: np.ndarray  # int32 [S]: KV length once this step's rows are written
    slot_mapping: tuple[np.ndarray, ...]  # G × int64 [T]: block * block_size + offset
    block_tables: tuple[np.ndarray, ...]  # G × int32 [S, max blocks]; 0 = null block
    sample_rows: np.ndarray  # int64 [R]: rows whose logits are needed, in span order
    sample_start: np.ndarray  # int32 [S+1]: sample rows of span s
    # Strands, empty where no request brings one.
    adapter_segments: tuple[AdapterSegment, ...] = ()  # by first row, then the request's order
    image_rows: np.ndarray  # int64 [I]: rows whose embedding comes from an image
    # Tokens that see each other though some come later: (span, start, end), positions of the
    # sequence. In order, apart, and within the span's KV length.
    ranges: np.ndarray = field(default_factory=lambda: _NO_RANGES)  # int32 [N, 3]


def build(plan: StepPlan, block_size: int, *, images: bool = True) -> StepBatch:
    """Lay a plan out flat, span after span; without `images`, as if all their tokens were text.

    The sequences are as they were when the plan was made. A row without a block of its own would
    be written where nobody looks for it, so that raises ValueError.
    """
    # Nearly all steps have few rows, for which lists are quicker than arrays.
    spans = plan.spans
    query_start, sample_start = [0], [0]
    positions: list[int] = []
    sample_rows: list[int] = []
    for span in spans:
        end = query_start[-1] + span.num_tokens
        positions += range(span.start, span.start + span.num_tokens)
        sample_rows += range(end - span.num_samples, end)  # its last
        query_start.append(end)
        sample_start.append(sample_start[-1] + span.num_samples)
    num_groups = len(spans[0].block_ids) if spans else 0
    blocks = [[span.block_ids[g] for span in spans] for g in range(num_groups)]
    batch = StepBatch(
        token_ids=_int64([token for span in spans for token in _tokens(span)]),
        positions=_int64(positions),
        query_start=_int32(query_start),
        seq_lens=_int32([span.start + span.num_tokens for span in spans]),
        slot_mapping=tuple(_slots(rows, spans, block_size) for rows in blocks),
        block_tables=tuple(_block_table(rows) for rows in blocks),
        sample_rows=_int64(sample_rows),
        sample_start=_int32(sample_start),
        adapter_segments=_adapter_segments(spans, query_start),
        image_rows=_NO_ROWS,
    )
    if images and any(span.sequence.request.images for span in spans):
        return _with_images(batch, spans)
    return batch


def _with_images(batch: StepBatch, spans: SequenceOf[Span]) -> StepBatch:
    first_rows = batch.query_start[:-1].tolist()
    rows, ranges = [np.zeros(0, np.int64)], []
    for s, (span, first) in enumerate(zip(spans, first_rows, strict=True)):
        request, start, stop = span.sequence.request, span.start, span.start + span.num_tokens
        for run in image_runs(request, start, stop):
            at = first + run.start - start
            rows.append(np.arange(at, at + run.length))
        ranges += [(s, *met) for met in request.spans if met[0] < stop and met[1] > start]
    return replace(
        batch,
        positions=_grid_positions(batch.positions, spans, first_rows),
        image_rows=np.concatenate(rows),
        ranges=np.array(ranges, np.int32).reshape(-1, 3),
    )


def _grid_positions(
    index: np.ndarray, spans: SequenceOf[Span], first_rows: SequenceOf[int]
) -> np.ndarray:
    """`index` where no request brings positions of its own; else [3, T], of text equal rows."""
    if not any(span.sequence.request.positions for span in spans):
        return index
    positions = np.tile(index, (3, 1))
    for span, first in zip(spans, first_rows, strict=True):
        request = span.sequence.request
        if not request.positions:
            continue
        num_known = max(0, min(len(request.prompt_token_ids) - span.start, span.num_tokens))
        known = np.frombuffer(request.positions, np.int32).reshape(3, -1)
        behind = first + num_known
        positions[:, first:behind] = known[:, span.start : span.start + num_known]
        positions[:, behind : first + span.num_tokens] += request.position_delta
    return positions


def _int64(values: SequenceOf[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _int32(values: SequenceOf[Any]) -> np.ndarray:
    return np.array(values, np.int32)


def _tokens(span: Span) -> list[int]:
    known_end = span.start + span.num_tokens - len(span.drafts)
    return [*span.sequence.tokens[span.start : known_end], *span.drafts]


def _block_table(rows: SequenceOf[tuple[int, ...]]) -> np.ndarray:
    width = max(map(len, rows), default=0)
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return _int32(padded).reshape(len(rows), width)


def _slots(
    rows: SequenceOf[tuple[int, ...]], spans: SequenceOf[Span], block_size: int
) -> np.ndarray:
    slots: list[int] = []
    for blocks, span in zip(rows, spans, strict=True):
        for position in range(span.start, span.start + span.num_tokens):
            block = blocks[position // block_size]
            if not block:
                raise ValueError("a row's block table entry is the null block")
            slots.append(block * block_size + position % block_size)
    return _int64(slots)


def _adapter_segments(
    spans: SequenceOf[Span], query_start: SequenceOf[int]
) -> tuple[AdapterSegment, ...]:
    """Where each adapter is active; neighbouring spans of one single adapter are one segment."""
    segments: list[AdapterSegment] = []
    for s, span in enumerate(spans):
        uses = span.sequence.request.adapters
        for use in uses:
            first = query_start[s] + max(0, use.active_from - span.start)
            end = query_start[s + 1]
            if first >= end:
                continue
            new = AdapterSegment(first, end, use.generation, use.scale)
            if len(uses) == 1 and segments and _adjoin(segments[-1], new):
                new = replace(new, start=segments.pop().start)
            segments.append(new)
    return tuple(segments)


def _adjoin(one: AdapterSegment, other: AdapterSegment) -> bool:
    """Whether `other` goes on where `one` ends. Where uses differ in number, one has two ends."""
    return (one.end, one.generation, one.scale) == (other.start, other.generation, other.scale)
