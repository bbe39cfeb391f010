"""Sequences for lookup sources, and what a search by brute force finds in their texts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from plait.platform.core import ImageItem, Request, SamplingParams, Sequence
from plait.speculative.occurrences import LONGEST
from plait.speculative.source import Want

VOCAB_SIZE = 100


def make_sequence(
    prompt: SequenceOf[int], output: SequenceOf[int] = (), *, seq_id: int = 0, **request: Any
) -> Sequence:
    asked = Request(
        request_id=f"r{seq_id}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=None),
        **request,
    )
    return Sequence(
        seq_id=seq_id,
        request=asked,
        index=0,
        arrival=seq_id,
        tokens=[*prompt, *output],
        max_total_tokens=1_000_000,
        seed=0,
    )


def make_image(start: int, num_tokens: int) -> ImageItem:
    return ImageItem(
        key="", start=start, num_tokens=num_tokens, embedded=((0, num_tokens),), tensors={}
    )


def want(sequence: Sequence, limit: int = 8, after: SequenceOf[int] = ()) -> Want:
    return Want(sequence=sequence, after=tuple(after), limit=limit)


def longest_by_search(
    text: SequenceOf[int], after: SequenceOf[int] = ()
) -> tuple[int, list[int]] | None:
    """The longest match of the end of text + after within text, its ends, latest first."""
    tail = [*text, *after]
    best, ends = 0, []
    for end in range(len(text) if after else len(text) - 1, 0, -1):
        length = 0
        while (
            length < min(end, len(tail), LONGEST)
            and text[end - 1 - length] == tail[-1 - length]
            and tail[-1 - length] >= 0
        ):
            length += 1
        if length > best:
            best, ends = length, [end]
        elif length == best > 0:
            ends.append(end)
    return (best, ends) if ends else None


def copy_by_search(
    text: SequenceOf[int], after: SequenceOf[int], end: int, limit: int
) -> tuple[int, ...]:
    """What comes from `end` on, token by token, up to a barrier."""
    known = [*text, *after]
    size = len(known)
    while len(known) < size + limit and known[end + len(known) - size] >= 0:
        known.append(known[end + len(known) - size])
    return tuple(known[size:])
