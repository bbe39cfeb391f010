"""Which rows the steps computed, by kind, and how the strands met in them.

    prefill   of sequences that lack more than one token: prompts, and what parked ones redo
    decode    the newest token of a sequence
    draft     drafts behind it, to be verified
    adapter   rows of all these that an adapter changes

Images and masks are counted by their strands.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plait.platform.batch import AdapterSegment, StepBatch
    from plait.platform.core import StepPlan

# Steps are told apart by which of these they had: bit i of a number for the i-th.
STRANDS = ("adapters", "images", "drafts", "grammars")


class RowCounts:
    """Counters since the start; a step of one sequence pays 2 µs, one of 64 with adapters 50 µs."""

    def __init__(self) -> None:
        self._prefill = self._decode = self._draft = self._adapter = 0
        self._by_strands = [0] * (1 << len(STRANDS))
        self._segments: SequenceOf[AdapterSegment] = ()

    def count(self, plan: StepPlan, batch: StepBatch, *, is_masked: bool) -> None:
        """A step is about to be computed, or a part of one."""
        num_rows = num_drafts = num_decoding = 0
        for span in plan.spans:
            drafts = len(span.drafts)
            num_rows += span.num_tokens
            num_drafts += drafts
            num_decoding += span.num_tokens == 1 + drafts
        self._prefill += num_rows - num_drafts - num_decoding
        self._decode += num_decoding
        self._draft += num_drafts
        self._segments = segments = batch.adapter_segments
        if segments:
            self._adapter += _num_rows(segments)
        has = (bool(segments), len(batch.image_rows) > 0, num_drafts > 0, is_masked)
        self._by_strands[sum(bit << i for i, bit in enumerate(has))] += 1

    @property
    def newest_adapters(self) -> int:
        """Different adapters in the newest step."""
        return len({segment.generation for segment in self._segments})

    @property
    def figures(self) -> dict[str, Any]:
        """Its fields of `messages.Stats`."""
        return {
            "prefill_rows": self._prefill,
            "decode_rows": self._decode,
            "draft_rows": self._draft,
            "adapter_rows": self._adapter,
            "steps_by_strands": tuple(self._by_strands),
        }


def _num_rows(segments: SequenceOf[AdapterSegment]) -> int:
    """Rows in one segment or more. They come by their first row."""
    count = end = 0
    for segment in segments:
        count += max(0, segment.end - max(segment.start, end))
        end = max(end, segment.end)
    return count
