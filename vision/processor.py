"""From decoded images and a prompt's text to what a `Request` holds of them.

An image is processed alone, whatever else its prompt holds, so it becomes the same wherever it
stands and can be kept: chats send their images again with every turn.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from plait.platform.core import Array
from plait.platform.errors import (
    ContextLengthExceeded,
    ImageTooLarge,
    InternalError,
    InvalidImage,
    ModelUnsupported,
    PlaitError,
)
from plait.vision.decode import DecodedImage
from plait.vision.expansion import TEXT_ALONE, build_processor, import_processor, read_json
from plait.vision.gathering import all_of
from plait.vision.identity import checkpoint_digest
from plait.vision.limits import MIB, PROCESSED_BYTES, amount
from plait.vision.placing import ProcessedImage
from plait.vision.prompts import ImagePrompts
from plait.vision.recipes import Recipe, recipe_of
from plait.vision.shared_work import SharedWork

if TYPE_CHECKING:
    from plait.platform.config import VisionInfo
    from plait.platform.tokenizer import Tokenizer

log = logging.getLogger("plait.vision")

KEPT_BYTES = 256 * MIB
# Of an image's sides. Some families resize the shorter one to a fixed length, which would make a
# thin image of a few kB as large as memory. It is Qwen's own bound.
MAX_ASPECT = 200
_TRIAL = DecodedImage(pixels=np.zeros((64, 48, 3), np.uint8), digest="trial", form="pixels")
_COMPARED = ((70, 110), (431, 97))  # sizes of images on which a quick processor is tried
_BLANK = Image.new("RGB", (2, 2))


class ImageProcessor(ImagePrompts):
    """Processes images for one model. Made by `load`; any thread may call."""

    def __init__(  # noqa: PLR0913 (see `load`)
        self,
        processor: Any,
        recipe: Recipe,
        vision: VisionInfo,
        *,
        embedded: str,
        identity: str,
        num_threads: int,
        kept_bytes: int,
    ) -> None:
        """`embedded` is the text of the token that takes the encoder's rows."""
        super().__init__(
            vision,
            placeholder=processor.image_token,
            embedded=embedded,
            begins_behind=processor.tokenizer.bos_token if recipe.begins_behind else None,
        )
        self._processor = processor
        self._recipe = recipe
        self._is_quick = False  # it takes arrays
        self._bytes_per_token = 0.0  # of tensors; known once it was tried
        merged = processor._merge_kwargs(tokenizer_init_kwargs={}, return_tensors="np")
        self._options: dict[str, Any] = merged["images_kwargs"]
        self._identity = f"{identity}\0{_settings(processor, self._options)}"
        self._work: SharedWork[ProcessedImage] = SharedWork(
            num_threads=num_threads, kept_bytes=kept_bytes, name="plait-process"
        )

    @classmethod
    def load(
        cls,
        directory: Path,
        tokenizer: Tokenizer,
        vision: VisionInfo,
        *,
        num_threads: int = 2,
        kept_bytes: int = KEPT_BYTES,
    ) -> ImageProcessor:
        """The processor of a checkpoint's directory, tried with an image.

        Brings transformers and torch. Raises `ModelUnsupported` by the family's name where its
        images cannot be processed.
        """
        family = vision.family
        config = read_json(directory, "config.json")
        recipe = recipe_of(config)
        if recipe is None:
            raise _unsupported(family, "no processor of that family is known here")
        token, embedded = vision.image_token_id, tokenizer.token_name(vision.image_token_id)
        if embedded is None or tokenizer.encode(embedded, add_special_tokens=False) != [token]:
            raise _unsupported(family, f"the tokenizer does not have the image token {token}")
        made = cls(
            build_processor(directory, recipe, tokenizer, config),
            recipe,
            vision,
            embedded=embedded,
            identity=checkpoint_digest(directory),
            num_threads=num_threads,
            kept_bytes=kept_bytes,
        )
        made._try(tokenizer)
        made._quicken()
        return made

    def _try(self, tokenizer: Tokenizer) -> None:
        """Find out at load, rather than with a client's first image, that it does not work."""
        family = self.vision.family
        try:
            tried = self._make("trial", True, _TRIAL)
        except (InvalidImage, InternalError) as error:
            cause = error.__cause__ or error
            raise _unsupported(
                family, f"its processor fails ({type(cause).__name__}: {cause})"
            ) from error
        self._bytes_per_token = tried.num_bytes / max(1, tried.num_embeds)
        ids = tokenizer.encode(tried.text, add_special_tokens=False)
        if not 0 < tried.num_embeds == ids.count(self.vision.image_token_id):
            raise _unsupported(
                family,
                f"its processor writes {tried.text[:64]!r}, and the model wants token "
                f"{self.vision.image_token_id} ({self._embedded!r})",
            )

    def _quicken(self) -> None:
        """Go on with a quicker processor, if it makes the same of images of noise."""
        from plait.vision.quick import quickened

        own = self._processor.image_processor
        quick = quickened(own)
        if quick is None:
            return
        noise = np.random.default_rng(0)
        tried = [
            DecodedImage(
                pixels=noise.integers(0, 256, (*size, 3), dtype=np.uint8), digest="", form="pixels"
            )
            for size in _COMPARED
        ]
        wanted = [self._make("", True, image) for image in tried]
        self._processor.image_processor, self._is_quick = quick, True
        try:
            found = [self._make("", True, image) for image in tried]
        except Exception:
            log.debug("a quick processor failed", exc_info=True)
            found = []
        if found != wanted:
            log.warning(
                "images of %s are processed by transformers' own code, which takes longer: ours "
                "differs from this release's", self.vision.family,
            )  # fmt: skip
            self._processor.image_processor, self._is_quick = own, False

    # --- images ---

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

    def _asked(self, image: DecodedImage, alone: bool) -> tuple[str, Callable[[], ProcessedImage]]:
        """The key of what an image becomes, and what makes it."""
        tiled = alone or not self._recipe.tiles_one_alone
        text = f"{image.digest}\0{tiled:d}\0{self._identity}"
        key = hashlib.sha256(text.encode()).hexdigest()
        return key, partial(self._make, key, tiled, image)

    def _make(self, key: str, tiled: bool, image: DecodedImage) -> ProcessedImage:
        if max(image.width, image.height) > MAX_ASPECT * min(image.width, image.height):
            raise _unfit(image)
        picture = np.array(image.pixels) if self._is_quick else Image.fromarray(image.pixels)
        given: list[Any] = [picture]
        try:
            if tiled:
                given = self._processor.prepare_inputs_layout(images=given)[0]
            else:  # beside another one, which is cheap
                given = [[picture, np.array(_BLANK) if self._is_quick else _BLANK]]
            made, texts = self._processor._process_images(given, **self._options)
            own = slice(None) if tiled else slice(1)
            tensors = {name: _array(name, made[name][own]) for name in self._recipe.tensors}
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            log.debug("an image could not be processed", exc_info=True)
            raise _unfit(image) from error
        text = str(texts[0])
        num_embeds = text.count(self._embedded)
        grid = _grid(tensors, self._processor) if self.vision.has_grid_positions else (0, 0, 0)
        return ProcessedImage(key=key, text=text, num_embeds=num_embeds, tensors=tensors, grid=grid)

    def count(self, height: int, width: int, *, alone: bool = True) -> int:
        """Image tokens of an image of that size, without its pixels; 0: not known before."""
        if self._recipe.tiles_one_alone and not alone:
            return int(self._processor.num_image_tokens) + 1
        try:
            counted = self._processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        except (ArithmeticError, AttributeError, TypeError, ValueError):
            return 0
        return int(counted.num_image_tokens[0])

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


def import_early(directory: Path) -> None:
    """Import what `ImageProcessor.load` will need, in a thread beside an engine that loads."""
    recipe = recipe_of(read_json(directory, "config.json"))
    if recipe is not None:
        import_processor(recipe)


def _unsupported(family: str, why: str) -> ModelUnsupported:
    return ModelUnsupported(f"images of {family} are not served: {why}. {TEXT_ALONE}")


def _unfit(image: DecodedImage) -> InvalidImage:
    return InvalidImage(
        f"this model cannot take an image of {image.width} × {image.height}: its sides are too "
        "short or too unequal"
    )


def _settings(processor: Any, options: Mapping[str, Any]) -> str:
    """All that decides what an image becomes, beside its pixels, as canonical JSON."""
    import PIL
    import transformers

    images = processor.image_processor
    plain = {k: v for k, v in vars(processor).items() if isinstance(v, str | int | float)}
    facts = {
        "processors": [type(processor).__name__, type(images).__name__],
        "images": images.to_dict(),
        "options": dict(options),
        "processor": plain,
        "versions": [transformers.__version__, PIL.__version__],
    }
    return json.dumps(facts, sort_keys=True, default=str)


def _array(name: str, value: Any) -> Array:
    """An image's own part of a tensor; some processors put all of a prompt's images in one row."""
    found = np.asarray(value)
    if found.dtype == object:
        raise InternalError(f"the processor's {name} is ragged")
    if (name, found.ndim) in (("pixel_values", 5), ("pixel_attention_mask", 4)):
        found = found[0]
    dtype = "float32" if name == "pixel_values" else "bool" if name.endswith("mask") else "int64"
    dense = np.ascontiguousarray(found, dtype=np.dtype(dtype))
    return Array(dtype=dense.dtype.name, shape=dense.shape, data=dense.tobytes())


def _grid(tensors: Mapping[str, Array], processor: Any) -> tuple[int, int, int]:
    """Merged patches of an image: time, rows, columns."""
    t, h, w = np.frombuffer(tensors["image_grid_thw"].data, np.int64).tolist()
    merge = processor.image_processor.merge_size
    return t, h // merge, w // merge


async def _named(at: str | None, index: int, work: Any) -> ProcessedImage:
    try:
        found: ProcessedImage = await work
    except InvalidImage as error:
        raise _of(at, index, error) from None
    return found


def _of(at: str | None, index: int, error: PlaitError) -> InvalidImage:
    """The error about one of several images, which others may have been told of as well."""
    return InvalidImage(f"{at or f'image {index + 1}'}: {error.message}", param=at or "messages")
