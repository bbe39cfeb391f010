"""From 8-bit pixels to what a vision tower takes: Pillow's resize and a table look-up.

The references are Pillow and transformers' image processors, with which the bits are equal. There
is nothing else to fall back to: without kernels these processors run as they are.
"""

from __future__ import annotations

import torch


def resize_rgb(
    pixels: torch.Tensor, size: tuple[int, int], resample: int, *, down_first: bool
) -> torch.Tensor:
    """Pixels [h, w, 3] as Pillow resizes them; 1 to 2 ms a megapixel of the result (AVX2).

    Args:
        pixels: uint8 [H, W, 3]; rows dense, they may lie apart.
        size: Height and width of the result.
        resample: 1: Lanczos, 2: bilinear, 3: bicubic.
        down_first: Columns before rows. Which of them Pillow takes depends on its release.

    Raises:
        RuntimeError: An argument does not fit; the message names it.
    """
    out = torch.empty((*size, 3), dtype=torch.uint8)
    torch.ops.plait.resize_rgb_(pixels, out, resample, down_first)
    return out


def pixel_planes(pixels: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """fp32 [3, H, W]: of each channel `table[channel, value]`.

    Args:
        pixels: uint8 [H, W, 3], of any strides.
        table: fp32 [3, 256].
    """
    out = torch.empty(3, pixels.shape[0], pixels.shape[1])
    torch.ops.plait.pixel_planes_(pixels, table, out)
    return out


def pixel_patches(
    pixels: torch.Tensor, table: torch.Tensor, *, size: int, merge: int, times: int
) -> torch.Tensor:
    """fp32 [H · W / size², 3 · times · size²]: `pixel_planes` cut into squares, as Qwen2-VL's.

    Each row is a square: by channel, by moment (of which there are `times`, all alike), by row.
    `merge` by `merge` neighbours follow each other. Height and width are multiples of both.
    """
    num_patches = pixels.shape[0] * pixels.shape[1] // size**2
    out = torch.empty(num_patches, 3 * times * size**2)
    torch.ops.plait.pixel_patches_(pixels, table, out, size, merge, times)
    return out
