"""Processors of images that do no more than resize, crop and normalise: without transformers.

CLIP's and SigLIP's are such, with what LLaVA, PaliGemma and their like write for an image. The
first start makes transformers' own processor, describes it by `recipe_for`, and compares both on
images of many shapes; a later start needs only what was written down (`later.py`). So the first
image of a server waits for nothing, and the server's process never loads torch: with transformers
that took 4.4 s of processor time and 290 MB.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.platform.core import Array
from plait.vision import pixel_library
from plait.vision.decode import DecodedImage
from plait.vision.placing import ProcessedImage
from plait.vision.processing import Processing

if TYPE_CHECKING:
    from plait.platform.config import VisionInfo
    from plait.vision.processor import ImageProcessor

log = logging.getLogger("plait.vision")

_CLASSES = ("CLIPImageProcessorPil", "SiglipImageProcessorPil")
_MOST_PIXELS = 1 << 22  # of what the tower gets: thin images are long before they are cropped
# Height and width of images that both must make the same of: smaller and larger than any tower's,
# thin, odd, and such as round to other sizes.
_COMPARED = (
    *((96, 96), (224, 224), (336, 336), (384, 384), (64, 48), (70, 110), (431, 97), (97, 431)),
    *((1, 1), (3, 2), (2, 399), (399, 2), (500, 333), (333, 500), (767, 1023), (1201, 801)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRecipe:
    """What becomes of an image: resized, cropped around its middle, looked up value by value."""

    size: tuple[int, int] | None  # height and width; None: the shorter side has `shorter`
    shorter: int
    crop: tuple[int, int] | None
    resample: int  # Pillow's number
    down_first: bool  # see `ops.pixels.resize_rgb`
    table: tuple[tuple[float, ...], ...]  # of each channel's 256 values
    text: str  # what stands for an image
    num_embeds: int
    bytes_per_token: float
    settings: str  # of transformers' processor, for keys

    @classmethod
    def of(cls, note: Mapping[str, Any]) -> PlainRecipe:
        """From what JSON made of `note`."""
        pairs = {name: note[name] and tuple(note[name]) for name in ("size", "crop")}
        table = tuple(tuple(channel) for channel in note["table"])
        return cls(**{**note, **pairs, "table": table})

    @property
    def note(self) -> dict[str, Any]:
        """All of it, as JSON can have it."""
        return asdict(self)

    def new_size(self, height: int, width: int) -> tuple[int, int]:
        """What an image is resized to, as transformers computes it."""
        if self.size is not None:
            return self.size
        longer = int(self.shorter * max(height, width) / min(height, width))
        return (longer, self.shorter) if width <= height else (self.shorter, longer)


class PlainProcessor(Processing):
    """See `ImageProcessor`, which makes the same."""

    def __init__(
        self, recipe: PlainRecipe, vision: VisionInfo, *, digest: str, **facts: Any
    ) -> None:
        """`digest` is the checkpoint's; `facts` those of the processor that was described."""
        super().__init__(
            vision=vision,
            identity=f"{digest}\0{recipe.settings}",
            bytes_per_token=recipe.bytes_per_token,
            **facts,
        )
        self._recipe = recipe
        self._table = np.array(recipe.table, np.float32)

    def count(self, height: int, width: int, *, alone: bool = True) -> int:  # noqa: ARG002
        """As many as every image takes. LLaVA's own count is of a crop, also where none is made."""
        return self._recipe.num_embeds

    def _make(self, key: str, tiled: bool, image: DecodedImage) -> ProcessedImage:  # noqa: ARG002
        recipe = self._recipe
        planes = processed(image.pixels, recipe, self._table)
        pixels = Array(dtype="float32", shape=(1, *planes.shape), data=planes.tobytes())
        return ProcessedImage(
            key=key,
            text=recipe.text,
            num_embeds=recipe.num_embeds,
            tensors={"pixel_values": pixels},
        )


def processed(pixels: np.ndarray, recipe: PlainRecipe, table: np.ndarray) -> np.ndarray:
    """fp32 [3, H, W] of pixels uint8 [h, w, 3]."""
    size = recipe.new_size(*pixels.shape[:2])
    if size != pixels.shape[:2]:
        pixels = pixel_library.resize_rgb(
            pixels, size, recipe.resample, down_first=goes_down_first(recipe, pixels.shape, size)
        )
    if recipe.crop is not None:
        top, left = ((have - want) // 2 for have, want in zip(size, recipe.crop, strict=True))
        pixels = pixels[top : top + recipe.crop[0], left : left + recipe.crop[1]]
    return pixel_library.pixel_planes(pixels, table)


def goes_down_first(recipe: PlainRecipe, old: tuple[int, ...], new: tuple[int, int]) -> bool:
    """Whether Pillow resizes columns before rows."""
    lost_height, lost_width = old[0] - new[0], old[1] - new[1]
    return recipe.down_first and lost_height > 0 and lost_height > 2 * lost_width


# --- describing one ---


def recipe_for(processor: ImageProcessor) -> PlainRecipe | None:
    """What makes the same of every image as `processor`; None: it does more, or ours differs."""
    found = _described(processor)
    if found is None:
        return None
    plain = PlainProcessor(found, processor.vision, digest="", **processor.facts)
    try:
        with processor.by_transformers_alone():
            same = all(_same(plain, processor, image) for image in _tried())
    except Exception:
        log.debug("a plain processor failed", exc_info=True)
        same = False
    finally:
        plain.close()
    return found if same else None


def _described(processor: ImageProcessor) -> PlainRecipe | None:
    images = processor.own_images
    if pixel_library.library() is None or type(images).__name__ not in _CLASSES:
        return None
    if processor.vision.has_grid_positions or processor.takes_tiles:
        return None
    wants = ("do_resize", "do_rescale", "do_normalize")
    if not all(getattr(images, name) for name in wants) or getattr(images, "do_pad", False):
        return None
    size, crop = images.size, _crop_of(images)
    exact = (size.height, size.width) if size.height and size.width else None
    shorter = 0 if exact else size.shortest_edge or 0
    room = exact or (shorter, shorter)
    if (not exact and (not shorter or size.longest_edge or not crop)) or (
        # A crop beyond the image would be filled up.
        crop and (crop[0] > room[0] or crop[1] > room[1])
    ):
        return None
    down_first = processor.pillow_weighs_directions()
    if down_first is None or int(images.resample) not in (1, 2, 3):
        return None
    trial = processor.make_anew(next(iter(_tried())))
    if set(trial.tensors) != {"pixel_values"}:
        return None
    return PlainRecipe(
        size=exact,
        shorter=shorter,
        crop=crop,
        resample=int(images.resample),
        down_first=down_first,
        table=_table(images),
        text=trial.text,
        num_embeds=trial.num_embeds,
        bytes_per_token=trial.num_bytes / max(1, trial.num_embeds),
        settings=processor.settings,
    )


def _crop_of(images: Any) -> tuple[int, int] | None:
    if not getattr(images, "do_center_crop", False):
        return None
    return int(images.crop_size.height), int(images.crop_size.width)


def _table(images: Any) -> tuple[tuple[float, ...], ...]:
    """What becomes of each value, by transformers' own arithmetic; a double has a float32 whole."""
    values = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (3, 256, 1))
    scaled = images.rescale(values, images.rescale_factor)
    made = np.asarray(images.normalize(scaled, images.image_mean, images.image_std), np.float32)
    return tuple(tuple(channel) for channel in made[:, :, 0].tolist())


def _tried() -> Any:
    noise = np.random.default_rng(0)
    for height, width in _COMPARED:
        pixels = noise.integers(0, 256, (height, width, 3), dtype=np.uint8)
        yield DecodedImage(pixels=pixels, digest=f"{height} {width}", form="pixels")


def _same(plain: PlainProcessor, processor: ImageProcessor, image: DecodedImage) -> bool:
    return plain._make("", True, image) == processor._make("", True, image)
