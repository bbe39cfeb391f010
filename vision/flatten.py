"""From whatever kind of pixels Pillow has to RGB, transparency laid on white.

Done in bands of rows, so that beside the decoded image and the result little memory is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from plait.platform.errors import InvalidImage

_BAND_PIXELS = 1 << 20
_WHITE = 255
_PLAIN = frozenset({"1", "L", "RGB", "P", "CMYK", "YCbCr", "HSV", "RGBX"})
_ALPHA = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
_16_BIT = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})


def flatten(image: Image.Image, depth: int = 8) -> np.ndarray:
    """RGB, uint8 [H, W, 3]. Raises `InvalidImage` for kinds of pixels that are not known.

    `image` is loaded; `depth` is its file's bits a channel.
    """
    width, height = image.size
    band = _converter(image, depth)
    pixels = np.empty((height, width, 3), np.uint8)
    step = max(1, _BAND_PIXELS // max(1, width))
    for top in range(0, height, step):
        bottom = min(top + step, height)
        pixels[top:bottom] = band(image.crop((0, top, width, bottom)))
    return pixels


def _converter(image: Image.Image, depth: int) -> Any:
    mode, key = image.mode, image.info.get("transparency")
    if mode in _16_BIT:
        return lambda part: _from_16_bit(part, key)
    if mode in _ALPHA or (mode == "P" and key is not None):
        return _on_white
    if mode not in _PLAIN:
        raise InvalidImage(
            f"an image of mode {mode} is not taken: its range is not known. Convert it to RGB"
        )
    if key is None or mode not in ("1", "L", "RGB"):
        return _rgb
    if depth > 8:
        raise InvalidImage(
            "a 16-bit PNG with one transparent colour is not taken: give it an alpha channel"
        )
    # A file names the colour in its own bits; Pillow stretches pixels to 8.
    colour = np.asarray(key).reshape(-1) * 255 // ((1 << depth) - 1)
    return lambda part: _without_colour(_rgb(part), colour)


def _rgb(part: Image.Image) -> np.ndarray:
    return np.asarray(part if part.mode == "RGB" else part.convert("RGB"))


def _on_white(part: Image.Image) -> np.ndarray:
    coloured = part if part.mode == "RGBA" else part.convert("RGBA")
    white = Image.new("RGB", part.size, (_WHITE,) * 3)
    white.paste(coloured, mask=coloured.getchannel("A"))
    return np.asarray(white)


def _from_16_bit(part: Image.Image, key: int | None) -> np.ndarray:
    values = np.asarray(part).astype(np.uint16, copy=False)
    grey = (values >> 8).astype(np.uint8)
    if key is not None:
        grey[values == key] = _WHITE
    return np.repeat(grey[:, :, None], 3, axis=2)


def _without_colour(pixels: np.ndarray, colour: np.ndarray) -> np.ndarray:
    """White where the file names this very colour as transparent."""
    shown = np.array(pixels)
    shown[(pixels == colour).all(axis=2)] = _WHITE
    return shown
