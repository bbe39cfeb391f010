"""Which rows take embeddings of images, and which: the one reading that all parts share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.core import ImageItem, Request


@dataclass(frozen=True, slots=True)
class ImageRun:
    """Consecutive tokens of a prompt that take consecutive embeddings of one image."""

    item: ImageItem
    start: int  # position in the prompt
    first_embed: int  # of the image's
    length: int


def touched(request: Request, start: int, stop: int) -> Iterator[ImageItem]:
    """Images of a request whose ranges meet positions start … stop - 1, in order."""
    for item in request.images:
        if item.start >= stop:
            return
        if item.start + item.num_tokens > start:
            yield item


def image_runs(request: Request, start: int, stop: int) -> Iterator[ImageRun]:
    """The runs among positions start … stop - 1, in order."""
    for item in touched(request, start, stop):
        first = 0
        for offset, length in item.embedded:
            begin = item.start + offset
            low, high = max(begin, start), min(begin + length, stop)
            if low < high:
                yield ImageRun(item, low, first + low - begin, high - low)
            first += length


def tower_uses(request: Request, item: ImageItem) -> Iterator[tuple[str, float]]:
    """Adapters that change an image's embeddings, as (digest, scale), in the request's order."""
    for use in request.adapters:
        if use.tower_digest and use.active_from <= item.start:
            yield use.tower_digest, use.scale
