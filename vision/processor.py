"""From decoded images to what a `Request` holds of them, by transformers' own processors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from plait.platform.core import Array
from plait.platform.errors import InternalError, InvalidImage, ModelUnsupported
from plait.vision.decode import DecodedImage
from plait.vision.expansion import TEXT_ALONE, build_processor, import_processor, read_json
from plait.vision.identity import checkpoint_digest
from plait.vision.placing import ProcessedImage
from plait.vision.processing import KEPT_BYTES, NUM_THREADS, Processing, unfit
from plait.vision.recipes import Recipe, recipe_of

if TYPE_CHECKING:
    from plait.platform.config import VisionInfo
    from plait.platform.text.tokenizer import Tokenizer

log = logging.getLogger("plait.vision")

_TRIAL = DecodedImage(pixels=np.zeros((64, 48, 3), np.uint8), digest="trial", form="pixels")
_COMPARED = ((70, 110), (431, 97))  # sizes of images on which a quick processor is tried
_BLANK = Image.new("RGB", (2, 2))


class ImageProcessor(Processing):
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
        merged = processor._merge_kwargs(tokenizer_init_kwargs={}, return_tensors="np")
        self._options: dict[str, Any] = merged["images_kwargs"]
        self.settings = _settings(processor, self._options)
        super().__init__(
            vision=vision,
            placeholder=processor.image_token,
            embedded=embedded,
            begins_behind=processor.tokenizer.bos_token if recipe.begins_behind else None,
            identity=f"{identity}\0{self.settings}",
            tiles_one_alone=recipe.tiles_one_alone,
            num_threads=num_threads,
            kept_bytes=kept_bytes,
        )
        self._processor = processor
        self._recipe = recipe
        self._is_quick = False  # it takes arrays
        self.own_images = processor.image_processor  # transformers' own, whatever is used

    @classmethod
    def load(
        cls,
        directory: Path,
        tokenizer: Tokenizer,
        vision: VisionInfo,
        *,
        num_threads: int = NUM_THREADS,
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

    @property
    def takes_tiles(self) -> bool:
        """Whether an image may become several, or another one beside others."""
        return self._recipe.tiles_one_alone or self._recipe.tensors != ("pixel_values",)

    @contextmanager
    def by_transformers_alone(self) -> Iterator[None]:
        """Within, images are processed by the family's own code. For who has it alone."""
        before = self._processor.image_processor, self._is_quick
        self._processor.image_processor, self._is_quick = self.own_images, False
        try:
            yield
        finally:
            self._processor.image_processor, self._is_quick = before

    @staticmethod
    def pillow_weighs_directions() -> bool | None:
        """See `quick.weighs_directions`."""
        from plait.vision.quick import weighs_directions

        return weighs_directions()

    def _make(self, key: str, tiled: bool, image: DecodedImage) -> ProcessedImage:
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
            raise unfit(image) from error
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


def import_early(directory: Path) -> None:
    """Import what `ImageProcessor.load` will need, in a thread beside an engine that loads."""
    recipe = recipe_of(read_json(directory, "config.json"))
    if recipe is not None:
        import_processor(recipe)


def _unsupported(family: str, why: str) -> ModelUnsupported:
    return ModelUnsupported(f"images of {family} are not served: {why}. {TEXT_ALONE}")


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
