"""Runs of a prompt that are computed in one step: where a chunk may end.

Tokens of `Request.spans` see each other whole, so a step that began such a span and did not end it
would compute rows without what they see. A step may *go on* inside one, though: what lies before
was computed when the whole span was, and what its rows see is there or in the step.
"""

from __future__ import annotations

from collections.abc import Iterable

Spans = Iterable[tuple[int, int]]  # [start, end), in order and apart


def least(spans: Spans, start: int) -> int:
    """The fewest tokens from `start` on that a step may compute."""
    return next((stop - start for begin, stop in spans if begin <= start < stop), 1)


def cut(spans: Spans, start: int, num_tokens: int) -> int:
    """The most tokens from `start` on, at most `num_tokens`, that cut no span; 0: none."""
    end = start + num_tokens
    for begin, stop in spans:
        if begin < end < stop:
            return max(0, begin - start)
    return num_tokens


def longest(spans: Spans) -> int:
    """Tokens of the longest span; 1 without any."""
    return max((stop - begin for begin, stop in spans), default=1)
