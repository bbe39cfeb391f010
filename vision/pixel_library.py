"""Resizing and normalising pixels in C++ without torch: `plait/_pixels.so`, by ctypes.

The kernels are those of `plait.platform.ops.pixels`, to the same bits. A process that needs nothing
else of torch saves its import, seconds and some 300 MB with what transformers brings.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np

import plait

_BYTES = ctypes.POINTER(ctypes.c_uint8)
_FLOATS = ctypes.POINTER(ctypes.c_float)


@functools.cache
def library() -> Any | None:
    """The library; None where it was not built."""
    try:
        found = ctypes.CDLL(str(Path(str(plait.__file__)).with_name("_pixels.so")))
    except OSError:
        return None
    size = ctypes.c_size_t
    found.plait_resize_rgb.argtypes = [
        _BYTES, size, size, _BYTES, size, size, ctypes.c_int, ctypes.c_int,
    ]  # fmt: skip
    found.plait_pixel_planes.argtypes = [_BYTES, size, size, size, _FLOATS, _FLOATS]
    found.plait_pixel_planes.restype = None
    return found


def resize_rgb(
    pixels: np.ndarray, size: tuple[int, int], resample: int, *, down_first: bool
) -> np.ndarray:
    """See `ops.pixels.resize_rgb`; `pixels` uint8 [H, W, 3], of any strides."""
    lib, dense = library(), np.ascontiguousarray(pixels)
    _check(dense, size, resample)
    out = np.empty((*size, 3), np.uint8)
    if lib is None or lib.plait_resize_rgb(
        _of(dense, _BYTES), *dense.shape[:2], _of(out, _BYTES), *size, resample, down_first
    ):
        raise RuntimeError("resize_rgb: no library, no memory, or an unknown PLAIT_CPU_ISA")
    return out


def pixel_planes(pixels: np.ndarray, table: np.ndarray) -> np.ndarray:
    """See `ops.pixels.pixel_planes`; a part of an image is taken as it lies."""
    lib = library()
    if lib is None or table.dtype != np.float32 or table.shape != (3, 256):
        raise RuntimeError("pixel_planes: no library, or the table is not float32 [3, 256]")
    if pixels.strides[1:] != (3, 1) or pixels.strides[0] < 0:
        pixels = np.ascontiguousarray(pixels)
    _check(pixels, pixels.shape[:2], 1)
    table, (height, width, _) = np.ascontiguousarray(table), pixels.shape
    out = np.empty((3, height, width), np.float32)
    lib.plait_pixel_planes(
        _of(pixels, _BYTES), pixels.strides[0], height, width, _of(table, _FLOATS),
        _of(out, _FLOATS),
    )  # fmt: skip
    return out


def _check(pixels: np.ndarray, size: tuple[int, ...], resample: int) -> None:
    """What the C++ side takes for granted."""
    if (
        pixels.dtype != np.uint8
        or pixels.ndim != 3
        or pixels.shape[2] != 3
        or min(*pixels.shape, *size) < 1
        or resample not in (1, 2, 3)
    ):
        raise RuntimeError("pixels must be uint8 [H, W, 3] and not empty, the filter 1, 2 or 3")


def _of(array: np.ndarray, kind: Any) -> Any:
    return array.ctypes.data_as(kind)
