"""What every processor of images does around the processing: keys, what is kept, bounds, errors.

An image is processed alone, whatever else its prompt holds, so it becomes the same wherever it
stands and can be kept: chats send their images again with every turn.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from plait.platform.errors import (
    ContextLengthExceeded,
    ImageTooLarge,
    InvalidImage,
    PlaitError,
)
from plait.vision.decode import DecodedImage
from plait.vision.gathering import all_of
from plait.vision.limits import MIB, PROCESSED_BYTES, amount
from plait.vision.placing import ProcessedImage
from plait.vision.prompts import ImagePrompts
from plait.vision.shared_work import SharedWork

NUM_THREADS = 2
KEPT_BYTES = 256 * MIB
# Of an image's sides. Some families resize the shorter one to a fixed length, which would make a
# thin image of a few kB as large as memory. It is Qwen's own bound.
MAX_ASPECT = 200


class Processing(ImagePrompts):
    """Processes images, each once for all who ask. Any thread may call."""

    def __init__(
        self,
        *,
        identity: str,
        tiles_one_alone: bool = False,
        bytes_per_token: float = 0.0,
        num_threads: int = NUM_THREADS,
        kept_bytes: int = KEPT_BYTES,
        **prompts: Any,
    ) -> None:
        """`identity` names all that decides what an image becomes; `prompts`: `ImagePrompts`'."""
        super().__init__(**prompts)
        self._identity = identity
        self._tiles_one_alone = tiles_one_alone
        self._bytes_per_token = bytes_per_token  # of tensors
        self._work: SharedWork[ProcessedImage] = SharedWork(
            num_threads=num_threads, kept_bytes=kept_bytes, name="plait-process"
        )

    @abstractmethod
    def count(self, height: int, width: int, *, alone: bool = True) -> int:
        """Image tokens of an image of that size, without its pixels; 0: not known before."""

    @abstractmethod
    def _make(self, key: str, tiled: bool, image: DecodedImage) -> ProcessedImage:
        """Process one. Raises `InvalidImage` where the family cannot take it."""

    async def process(
        self, images: Sequence[DecodedImage], salt: str = "", *, at: Sequence[str] = ()
    ) -> list[ProcessedImage]:
        """The images of one prompt, off the event loop. `at`: where they stand, for errors.

        What is kept is found again under the same `salt` alone: how long an answer takes must not
        tell one user what another has sent. Raises `InvalidImage` where the family cannot take one,
        with its place, or its number where no places are given.
        """
        works = [self._asked(image, len(images) == 1) for image in images]
        return await all_of(
            _named(at[i] if at else None, i, self._work.get(f"{salt}\0{key}", make))
            for i, (key, make) in enumerate(works)
        )

    def process_blocking(
        self, images: Sequence[DecodedImage], *, at: Sequence[str] = ()
    ) -> list[ProcessedImage]:
        """`process` for callers without an event loop."""
        found = []
        for i, image in enumerate(images):
            try:
                found.append(self._work.get_blocking(*self._asked(image, len(images) == 1)))
            except InvalidImage as error:
                raise _of(at[i] if at else None, i, error) from None
        return found

    def make_anew(self, image: DecodedImage) -> ProcessedImage:
        """One image alone, in this thread, whatever is kept: to measure what that takes."""
        return self._asked(image, alone=True)[1]()

    def check_room(self, images: Sequence[DecodedImage], room: int) -> dict[str, int]:
        """Refuse images that alone are longer than `room` tokens, before they are processed.

        The bytes, about, of what they become, by what that is kept under. Raises
        `ContextLengthExceeded` with the numbers, `ImageTooLarge` over the bound on memory.
        """
        counts = [self.count(i.height, i.width, alone=len(images) == 1) for i in images]
        num_bytes = int(sum(counts) * self._bytes_per_token)
        if num_bytes > PROCESSED_BYTES:
            raise ImageTooLarge(
                f"the images take {amount(num_bytes)} as the model reads them; at most "
                f"{amount(PROCESSED_BYTES)} are taken. Send fewer, or smaller ones",
                param="messages",
            )
        if sum(counts) <= room:
            return {
                self._asked(image, len(images) == 1)[0]: int(count * self._bytes_per_token)
                for image, count in zip(images, counts, strict=True)
            }
        most = max(range(len(counts)), key=counts.__getitem__)
        raise ContextLengthExceeded(
            f"the images take {sum(counts):,} tokens, and the prompt may have {max(0, room):,}: "
            f"image {most + 1} takes {counts[most]:,} ({images[most].width} × "
            f"{images[most].height}). Send fewer, or smaller ones",
            param="messages",
        )

    @property
    def kept_bytes(self) -> int:
        """Memory of processed images that are kept for later requests."""
        return self._work.num_bytes

    def close(self) -> None:
        """End the threads."""
        self._work.close()

    def _asked(self, image: DecodedImage, alone: bool) -> tuple[str, Callable[[], ProcessedImage]]:
        """The key of what an image becomes, and what makes it."""
        tiled = alone or not self._tiles_one_alone
        text = f"{image.digest}\0{tiled:d}\0{self._identity}"
        key = hashlib.sha256(text.encode()).hexdigest()
        return key, partial(self._checked, key, tiled, image)

    def _checked(self, key: str, tiled: bool, image: DecodedImage) -> ProcessedImage:
        if max(image.width, image.height) > MAX_ASPECT * min(image.width, image.height):
            raise unfit(image)
        return self._make(key, tiled, image)


def unfit(image: DecodedImage) -> InvalidImage:
    """The error about an image of a shape that the family does not take."""
    return InvalidImage(
        f"this model cannot take an image of {image.width} × {image.height}: its sides are too "
        "short or too unequal"
    )


async def _named(at: str | None, index: int, work: Any) -> ProcessedImage:
    try:
        found: ProcessedImage = await work
    except InvalidImage as error:
        raise _of(at, index, error) from None
    return found


def _of(at: str | None, index: int, error: PlaitError) -> InvalidImage:
    """The error about one of several images, which others may have been told of as well."""
    return InvalidImage(f"{at or f'image {index + 1}'}: {error.message}", param=at or "messages")
