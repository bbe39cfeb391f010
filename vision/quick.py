"""transformers' image processors with their slow parts in C++, to the same bits.

What costs time in them is Pillow's resize and numpy's arithmetic in double precision. A quick
processor is the family's own class with these steps below it; sizes, tiles, padding and order stay
the family's. `quickened` makes one where that can be, and whoever uses it compares it with the
original first: a family, a Pillow or a transformers that does otherwise is served by its own code.

Importing this brings transformers and torch.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import get_resize_output_image_size, get_size_with_aspect_ratio
from transformers.image_utils import ChannelDimension, get_image_size_for_max_height_width

from plait.platform.ops._native import has_kernels
from plait.platform.ops.pixels import pixel_patches, pixel_planes, resize_rgb

_FILTERS = (Image.Resampling.LANCZOS, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)
_REPLACED = ("process_image", "rescale", "normalize")


# Of a class that its users see as `Any`: mypy knows its methods by their many options.
_Backend: Any = PilBackend


def quickened(images: Any) -> Any | None:
    """A processor that takes arrays uint8 [H, W, 3] and makes the same of them; None: none can."""
    kind: Any = type(images)
    if not (issubclass(kind, PilBackend) and has_kernels() and _knows_pillow()):
        return None
    if not (images.do_rescale and images.do_normalize):
        return None
    if any(getattr(kind, name) is not getattr(PilBackend, name) for name in _REPLACED):
        return None
    patchify = {"patchify": _patchify} if hasattr(kind, "patchify") else {}
    made = copy.copy(images)
    # The family's name, which is in keys of what is kept: the result is the same.
    made.__class__ = type(kind.__name__, (kind, _QuickBackend), patchify)
    made.__dict__["tables"] = {}
    return made


class _Scaled(np.ndarray):
    """8-bit pixels [3, H, W] that are to be multiplied by `scale`, and then to be normalised."""

    scale: float


class _Normalized(np.ndarray):
    """8-bit pixels [3, H, W] whose values are to be looked up in `table`."""

    table: torch.Tensor


class _QuickBackend(_Backend):  # type: ignore[misc]
    """Stands between a family's class and `PilBackend`, where the family's `super()` finds it."""

    tables: dict[Any, torch.Tensor]

    def process_image(self, image: Any, **options: Any) -> Any:
        """[3, H, W]. An array has its channels last, whatever its sides are."""
        if isinstance(image, np.ndarray):
            return np.moveaxis(image, -1, 0)
        return super().process_image(image, **options)

    def resize(
        self, image: Any, size: Any, resample: Any = None, reducing_gap: Any = None, **options: Any
    ) -> Any:
        """As `PilBackend.resize`."""
        resample = Image.Resampling.BILINEAR if resample is None else resample
        if not _is_rgb(image) or reducing_gap is not None or resample not in _FILTERS:
            return super().resize(
                image, size, resample=resample, reducing_gap=reducing_gap, **options
            )
        new = _new_size(image, size)
        if new == image.shape[1:]:
            return image
        pixels = np.moveaxis(image, 0, -1)
        if pixels.strides[1:] != (3, 1):
            pixels = np.ascontiguousarray(pixels)
        down_first = _goes_down_first(pixels.shape[:2], new)
        made = resize_rgb(torch.from_numpy(pixels), new, int(resample), down_first=down_first)
        return np.moveaxis(made.numpy(), -1, 0)

    def rescale(self, image: Any, scale: float, **options: Any) -> Any:
        """As `PilBackend.rescale`, but put off: `normalize` always follows."""
        if not _is_rgb(image):
            return super().rescale(image, scale, **options)
        put_off = image.view(_Scaled)
        put_off.scale = scale
        return put_off

    def normalize(self, image: Any, mean: Any, std: Any, **options: Any) -> Any:
        """As `PilBackend.normalize` after `rescale`; put off again where patches are cut."""
        if not isinstance(image, _Scaled):
            return super().normalize(image, mean, std, **options)
        table = self._table(image.scale, mean, std)
        if hasattr(type(self), "patchify"):
            put_off = image.view(_Normalized)
            put_off.table = table
            return put_off
        return pixel_planes(_pixels(image), table).numpy()

    def _table(self, scale: float, mean: Any, std: Any) -> torch.Tensor:
        """What becomes of each value of each channel, by transformers' own arithmetic."""
        key = scale, tuple(mean), tuple(std)
        if key not in self.tables:
            values = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None], (3, 256, 1))
            made = super().normalize(super().rescale(values, scale), mean, std)
            self.tables[key] = torch.from_numpy(np.ascontiguousarray(made[:, :, 0]))
        return self.tables[key]


def _patchify(
    self: Any, image: Any, patch_size: int, merge_size: int, temporal_patch_size: int
) -> Any:
    """As the `patchify` of Qwen's and GLM's processors."""
    if not isinstance(image, _Normalized):
        return super(type(self), self).patchify(image, patch_size, merge_size, temporal_patch_size)
    made = pixel_patches(
        _pixels(image), image.table, size=patch_size, merge=merge_size, times=temporal_patch_size
    )
    _, height, width = image.shape
    return made.numpy(), height // patch_size, width // patch_size


def _is_rgb(image: Any) -> bool:
    return bool(image.dtype == np.uint8 and image.ndim == 3 and image.shape[0] == 3)


def _pixels(image: Any) -> torch.Tensor:
    """[H, W, 3] of [3, H, W], in the same memory."""
    return torch.from_numpy(np.moveaxis(image.view(np.ndarray), 0, -1))


def _new_size(image: Any, size: Any) -> tuple[int, int]:
    """The height and width that `PilBackend.resize` would choose."""
    height, width = image.shape[1:]
    if size.shortest_edge and size.longest_edge:
        new = get_size_with_aspect_ratio((height, width), size.shortest_edge, size.longest_edge)
    elif size.shortest_edge:
        new = get_resize_output_image_size(
            image,
            size=size.shortest_edge,
            default_to_square=False,
            input_data_format=ChannelDimension.FIRST,
        )
    elif size.max_height and size.max_width:
        new = get_image_size_for_max_height_width((height, width), size.max_height, size.max_width)
    elif size.height and size.width:
        new = (size.height, size.width)
    else:
        raise ValueError(f"{size} says no size")
    return int(new[0]), int(new[1])


def _goes_down_first(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Whether Pillow resizes columns before rows."""
    lost_height, lost_width = old[0] - new[0], old[1] - new[1]
    return bool(weighs_directions()) and lost_height > 0 and lost_height > 2 * lost_width


def _knows_pillow() -> bool:
    return weighs_directions() is not None


@functools.cache
def weighs_directions() -> bool | None:
    """Whether this Pillow chooses which direction comes first; older ones always begin with rows.

    None: it resizes in a way that is not known here.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (40, 20, 3), dtype=np.uint8)
    wanted = np.asarray(Image.fromarray(pixels).resize((30, 10), Image.Resampling.BICUBIC))
    for down_first in (True, False):
        made = resize_rgb(torch.from_numpy(pixels), (10, 30), 3, down_first=down_first)
        if np.array_equal(made.numpy(), wanted):
            return down_first
    return None
