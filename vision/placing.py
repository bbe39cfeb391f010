"""Where the images of a prompt are: ranges, positions and bidirectional spans, from token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plait.platform.config import VisionInfo
from plait.platform.core import Array, ImageItem
from plait.platform.errors import BadRequest, InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedImage:
    """One image as the model takes it, wherever it will stand in a prompt."""

    key: str  # as `ImageItem.key`
    text: str  # what stands for it in the prompt
    num_embeds: int  # tokens of that text which take the encoder's rows
    tensors: Mapping[str, Array]
    grid: tuple[int, int, int] = (0, 0, 0)  # time, rows, columns; of families with M-RoPE

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return len(self.text) + sum(len(array.data) for array in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImages:
    """The images of one prompt; the fields are those of `core.Request`."""

    items: tuple[ImageItem, ...]
    positions: bytes = b""
    position_delta: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    vision_digest: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt that are images'."""
        return sum(item.num_embeds for item in self.items)


NO_IMAGES = PlacedImages(items=())


def place(
    token_ids: Sequence[int], images: Sequence[ProcessedImage], vision: VisionInfo
) -> PlacedImages:
    """Find each image in the prompt. `images` are in their order there.

    Raises `BadRequest` where the prompt has not just so many image tokens as they take.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    at = np.flatnonzero(ids == vision.image_token_id)
    wanted = sum(image.num_embeds for image in images)
    if len(at) != wanted:
        raise BadRequest(
            f"the prompt has {len(at)} image tokens, and its images take {wanted}: text must not "
            "hold the names of image tokens",
            param="messages",
        )
    items, done = [], 0
    for image in images:
        items.append(_item(image, at[done : done + image.num_embeds]))
        done += image.num_embeds
    positions, delta = b"", 0
    if vision.has_grid_positions and images:
        grids = [image.grid for image in images]
        rows = grid_positions(len(ids), [item.start for item in items], grids)
        positions, delta = rows.tobytes(), int(rows.max()) + 1 - len(ids)
    return PlacedImages(
        items=tuple(items),
        positions=positions,
        position_delta=delta,
        spans=_spans(len(ids), items, vision),
        vision_digest=_digest(ids, items) if vision.bidirectional == "prefix" and items else "",
    )


def _item(image: ProcessedImage, at: np.ndarray) -> ImageItem:
    """`at`: positions of its image tokens. Its range ends with the last of them."""
    start = int(at[0])
    cuts = np.flatnonzero(np.diff(at) != 1) + 1
    runs = [(int(run[0]) - start, len(run)) for run in np.split(at, cuts)]
    return ImageItem(
        key=image.key,
        start=start,
        num_tokens=int(at[-1]) + 1 - start,
        embedded=tuple(runs),
        tensors=image.tensors,
    )


def grid_positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[tuple[int, int, int]]
) -> np.ndarray:
    """M-RoPE positions int32 [3, num_tokens] of a prompt with images of `grids` at `starts`.

    Text goes on by one in all rows. An image at position p has time p + t, height p + i, width
    p + j, and what follows it begins at p + max(rows, columns) (Wang et al. 2024, Qwen2-VL).
    """
    rows = np.empty((3, num_tokens), np.int32)
    done, position = 0, 0
    for start, (t, h, w) in zip(starts, grids, strict=True):
        end = start + t * h * w
        if end > num_tokens or start < done:
            raise InternalError(f"an image of {t} × {h} × {w} does not fit its place in the prompt")
        rows[:, done:start] = np.arange(position, position + start - done)
        position += start - done
        rows[:, start:end] = position + np.indices((t, h, w)).reshape(3, -1)
        position += max(h, w)
        done = end
    rows[:, done:] = np.arange(position, position + num_tokens - done)
    return rows


def _spans(
    num_tokens: int, items: Sequence[ImageItem], vision: VisionInfo
) -> tuple[tuple[int, int], ...]:
    if not items or not vision.bidirectional:
        return ()
    if vision.bidirectional == "prefix":
        return ((0, num_tokens),)
    return tuple((i.start + at, i.start + at + n) for i in items for at, n in i.embedded)


def _digest(ids: np.ndarray, items: Sequence[ImageItem]) -> str:
    """Of a prompt whose every token sees every other: its text and all its images."""
    digest = hashlib.sha256(ids.tobytes())
    for item in items:
        digest.update(f"\0{item.start}\0{item.key}".encode())
    return digest.hexdigest()
