"""What followed where a text's end occurred before: the tokens to propose, and text made ready."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from plait.speculative.occurrences import BARRIER, LONGEST, NUM_IDS

if TYPE_CHECKING:
    from plait.platform.core import Request, Sequence

MAX_BUCKET = LONGEST.bit_length() - 1


def bucket(length: int) -> int:
    """The class of a match: 0 for one token, 1 from 2 on, 2 from 4 on, and so forth."""
    return min(length.bit_length() - 1, MAX_BUCKET)


def num_ids(request: Request, vocab_size: int) -> int:
    """How many token ids may be proposed for a request."""
    return min(request.vocab_size or vocab_size, NUM_IDS)


def readable(sequence: Sequence, start: int, vocab_size: int) -> list[int]:
    """The sequence's tokens from `start` on, with barriers for images and unknown ids."""
    tokens = sequence.tokens[start:]
    for image in sequence.request.images:
        first, last = max(image.start - start, 0), image.start + image.num_tokens - start
        if last > first:
            tokens[first:last] = [BARRIER] * (last - first)
    known = num_ids(sequence.request, vocab_size)
    if tokens and max(tokens) >= known:
        tokens = [token if token < known else BARRIER for token in tokens]
    return tokens


def copied(text: array[int], end: int, after: SequenceOf[int], limit: int) -> list[int]:
    """Up to `limit` tokens of `text` and `after` from `end` on, at most up to a barrier.

    A text that repeats goes on repeating: behind it come the tokens copied so far.
    """
    tokens = text[end : end + limit].tolist()
    if len(tokens) < limit:
        tokens += after
        period = len(tokens)
        while len(tokens) < limit:
            tokens.append(tokens[-period])
        del tokens[limit:]
    return tokens[: tokens.index(BARRIER)] if BARRIER in tokens else tokens


def voted(
    text: array[int], ends: SequenceOf[int], limit: int, floor: float
) -> tuple[list[int], list[float]]:
    """The most frequent tokens behind `ends`, and each one's share among those that got so far.

    Up to a barrier (one must stand at the text's end), `limit` tokens, or where the product of the
    shares falls below `floor`. Among equals that of the first of `ends` wins.
    """
    tokens: list[int] = []
    shares: list[float] = []
    product = 1.0
    while len(tokens) < limit:
        if len(ends) == 1:
            rest = copied(text, ends[0] + len(tokens), (), limit - len(tokens))
            return tokens + rest, shares + [1.0] * len(rest)
        nexts = [text[end + len(tokens)] for end in ends]
        token, share = nexts[0], 1.0
        if nexts.count(token) < len(nexts):
            token, count = Counter(nexts).most_common(1)[0]
            share = count / len(nexts)
            product *= share
            ends = [end for end, behind in zip(ends, nexts, strict=True) if behind == token]
        if token == BARRIER or product < floor:
            break
        tokens.append(token)
        shares.append(share)
    return tokens, shares
