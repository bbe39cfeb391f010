"""The processor of a served model: made at the first start, and later with its first image.

Making one brings transformers and torch, seconds in which nothing is served. A start that did so,
and tried it, leaves a note of what prompts look like, under a key of all that it depends on; a
start that finds the note answers text at once, and makes the processor beside. Where the processor
does so little that ours does the same (`plain.py`), the note says what, and it is never made again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import plait
from plait.platform.starting.notes import Notes, cache_of, code, key_of
from plait.vision.identity import checkpoint_digest, checkpoint_directory
from plait.vision.parts import takes_images
from plait.vision.plain import PlainProcessor, PlainRecipe, recipe_for
from plait.vision.processor import ImageProcessor
from plait.vision.prompts import ImagePrompts

if TYPE_CHECKING:
    from plait.platform.config import ModelInfo, Options
    from plait.platform.text.tokenizer import Tokenizer
    from plait.vision.decode import DecodedImage
    from plait.vision.placing import ProcessedImage

_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # of a checkpoint: configs and tokenizers
_LIBRARIES = ("transformers", "torch", "pillow", "numpy", "tokenizers")


class LaterProcessor(ImagePrompts):
    """An `ImageProcessor` that is made when it is first needed. Any thread may call."""

    def __init__(self, model: ModelInfo, facts: Any, make: Callable[[], ImageProcessor]) -> None:
        """`facts` are those of the processor that `make` makes."""
        assert model.vision is not None
        super().__init__(model.vision, **facts)
        self._make = make
        self._made: ImageProcessor | None = None
        self._making = threading.Lock()

    def open(self) -> ImageProcessor:
        """The processor; seconds, the first time. Raises `ModelUnsupported`."""
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made

    async def process(
        self, images: Sequence[DecodedImage], salt: str = "", *, at: Sequence[str] = ()
    ) -> list[ProcessedImage]:
        """See `ImageProcessor.process`."""
        made = self._made
        if made is None:
            made = await asyncio.to_thread(self.open)
        return await made.process(images, salt, at=at)

    def process_blocking(
        self, images: Sequence[DecodedImage], *, at: Sequence[str] = ()
    ) -> list[ProcessedImage]:
        """See `ImageProcessor.process_blocking`."""
        return self.open().process_blocking(images, at=at)

    def make_anew(self, image: DecodedImage) -> ProcessedImage:
        """See `ImageProcessor.make_anew`."""
        return self.open().make_anew(image)

    def count(self, height: int, width: int, *, alone: bool = True) -> int:
        """See `ImageProcessor.count`."""
        return self.open().count(height, width, alone=alone)

    def check_room(self, images: Sequence[DecodedImage], room: int) -> dict[str, int]:
        """See `ImageProcessor.check_room`."""
        return self.open().check_room(images, room)

    @property
    def kept_bytes(self) -> int:
        """See `ImageProcessor.kept_bytes`."""
        return 0 if self._made is None else self._made.kept_bytes

    def close(self) -> None:
        """End the threads, if there are any."""
        if self._made is not None:
            self._made.close()


ServedProcessor = ImageProcessor | LaterProcessor | PlainProcessor


def processor_of(
    model: ModelInfo, options: Options, tokenizer: Tokenizer
) -> ServedProcessor | None:
    """The processor of a model that was loaded; None where it takes no images.

    Raises `ModelUnsupported`.
    """
    if model.vision is None or options.model is None or not takes_images(model, options):
        return None
    vision, directory = model.vision, checkpoint_directory(options.model, options.revision)

    def make() -> ImageProcessor:
        return ImageProcessor.load(directory, tokenizer, vision)

    folder = cache_of(options)
    notes = None if folder is None else Notes(folder)
    key = None if notes is None else _key(notes, directory)
    note = None if notes is None or key is None else notes.read(key)
    made = None
    if note is None:
        made = make()
        plain = recipe_for(made)
        note = {"facts": made.facts, "plain": None if plain is None else plain.note}
        if notes is not None and key is not None:
            notes.write(key, note)
    if note["plain"] is None:
        return made or LaterProcessor(model, note["facts"], make)
    if made is not None:
        made.close()
    recipe, digest = PlainRecipe.of(note["plain"]), checkpoint_digest(directory)
    return PlainProcessor(recipe, vision, digest=digest, **note["facts"])


def was_made(options: Options, directory: Path) -> bool:
    """Whether an earlier start left a note for the checkpoint in `directory`, as it is now."""
    folder = cache_of(options)
    if folder is None:
        return False
    notes = Notes(folder)
    key = _key(notes, directory)
    return key is not None and notes.read(key) is not None


def _key(notes: Notes, directory: Path) -> str | None:
    """Names all that a processor, and whether it can be made, depends on."""
    try:
        files = sorted({path for pattern in _FILES for path in directory.glob(pattern)})
        digests = [[path.name, notes.digest(path)] for path in files]
    except OSError:
        return None
    pixels = Path(str(plait.__file__)).with_name("_pixels.so")
    return key_of("processor", digests, code(Path(__file__).parent, _LIBRARIES, pixels))
