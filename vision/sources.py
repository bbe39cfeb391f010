"""Where an image's bytes are: what a client may write in a request, or a caller may hand over."""

from __future__ import annotations

import binascii
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from plait.platform.errors import BadRequest, ImageTooLarge, InvalidImage, Unsupported
from plait.vision.decode import DecodedImage, check_size, upright
from plait.vision.flatten import flatten
from plait.vision.formats.exif import orientation
from plait.vision.limits import ImageLimits, amount

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*):")
_PIECE = 1 << 20
# Values of hexadecimal digits by their byte; 255 for all others.
_HEX = np.full(256, 255, np.uint8)
_HEX[list(b"0123456789abcdef")] = _HEX[list(b"0123456789ABCDEF")] = range(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataUrl:
    """A `data:` URL, not decoded yet."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WebUrl:
    """An address to fetch, if its host is allowed."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBytes:
    """A file's bytes. Offline only."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePath:
    """A file on this machine. Offline only."""

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImagePixels:
    """Pixels: a PIL image, or an array uint8 [H, W, 3]. Offline only."""

    value: Any


ImageSource = DataUrl | WebUrl | ImageBytes | ImagePath | ImagePixels


def read_url(url: str) -> DataUrl | WebUrl:
    """What a client may write as an image's URL. Raises `BadRequest`, `Unsupported`."""
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    if scheme == "data":
        return DataUrl(url=url)
    if scheme in ("http", "https"):
        return WebUrl(url=url)
    if scheme:
        raise Unsupported(f"an image's URL begins with data: or https:, not with {scheme[:32]}:")
    raise BadRequest("an image's URL begins with data:, or with https:// and a host")


def read_local(value: Any) -> ImageSource:
    """What a caller in this process may hand over as an image. Raises `BadRequest`."""
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageBytes(data=bytes(value))
    if isinstance(value, str) and re.match(r"(data|https?|file):", value, re.IGNORECASE):
        return _read_local_url(value)
    if isinstance(value, str | os.PathLike):
        return ImagePath(path=Path(value))
    if isinstance(value, Image.Image | np.ndarray):
        return ImagePixels(value=value)
    raise BadRequest(
        "an image is a PIL image, an array uint8 [H, W, 3], bytes, a path or a URL, "
        f"not {type(value).__name__}"
    )


def _read_local_url(url: str) -> ImageSource:
    if url[:5].lower() == "file:":
        raise Unsupported("a file is given by its path, without file:")
    if url[:4].lower() == "http":
        raise Unsupported(
            "nothing is fetched from the web here: give the file's bytes, its path or a data: URL"
        )
    return read_url(url)


def read_data_url(source: DataUrl, limits: ImageLimits) -> bytes:
    """The file in a `data:` URL. What it says of its type is not looked at.

    Raises `ImageTooLarge` before anything is decoded, `InvalidImage`.
    """
    comma = source.url.find(",", 0, 1024)
    if comma < 0:
        raise InvalidImage("the data: URL has no comma: write data:image/png;base64,…")
    is_base64 = source.url[:comma].rstrip().lower().endswith(";base64")
    num_chars = len(source.url) - comma - 1
    if "%" not in source.url:
        num_bytes = num_chars // 4 * 3 if is_base64 else num_chars
        _check_bytes(num_bytes - 2, limits)
    elif num_chars > 4 * limits.image_bytes:  # each of base64's characters may be three
        raise _too_large(limits)
    payload = source.url[comma + 1 :]
    if not payload.isascii():
        raise InvalidImage("the data: URL holds characters beyond ASCII")
    raw = payload.encode()
    if b"%" in raw:
        raw = _without_escapes(raw)
    if is_base64:
        raw = _from_base64(raw)
    _check_bytes(len(raw), limits)
    return raw


def read_path(source: ImagePath, limits: ImageLimits) -> bytes:
    """A file's bytes. Raises `BadRequest` where it cannot be read, `ImageTooLarge`."""
    try:
        with source.path.open("rb") as file:
            data = file.read(limits.image_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no path"
        raise BadRequest(f"the image {str(source.path)[:256]} cannot be read: {reason}") from None
    _check_bytes(len(data), limits)
    return data


def read_pixels(source: ImagePixels, limits: ImageLimits) -> DecodedImage:
    """Pixels that were handed over, in the same form as decoded ones. Raises `InvalidImage`."""
    value = source.value
    if isinstance(value, Image.Image):
        check_size(*value.size, limits)
        pixels = _of_pil(value)
    else:
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
            raise InvalidImage(
                f"an array of {value.dtype} {list(value.shape)} is not taken as an image: give "
                "uint8 [H, W, 3], RGB"
            )
        check_size(value.shape[1], value.shape[0], limits)
        pixels = np.array(value, order="C")  # a copy: the caller's may change
    pixels.setflags(write=False)
    digest = hashlib.sha256(f"pixels {pixels.shape[0]} {pixels.shape[1]}\0".encode())
    digest.update(pixels.data)
    return DecodedImage(pixels=pixels, digest=digest.hexdigest(), form="pixels")


def _of_pil(image: Image.Image) -> np.ndarray:
    try:
        image.load()
        turned = image.info.get("exif")
        pixels = flatten(image)
    except BadRequest:
        raise
    except Exception:  # noqa: BLE001 - Pillow decodes late, and raises whatever a broken file does
        raise InvalidImage("the PIL image cannot be decoded: its data are damaged") from None
    return upright(pixels, orientation(turned) if isinstance(turned, bytes) else 1)


def _without_escapes(raw: bytes) -> bytes:
    """Percent-encoding undone, piece by piece: a file may be escaped to its last byte."""
    pieces, start = [], 0
    while start < len(raw):
        stop = start + _PIECE
        if stop < len(raw):  # no escape is cut
            cut = raw.find(b"%", stop - 2, stop)
            stop = cut if cut >= 0 else stop
        pieces.append(_without_escapes_in(np.frombuffer(raw[start:stop], np.uint8)))
        start = stop
    return b"".join(pieces)


def _without_escapes_in(piece: np.ndarray) -> bytes:
    padded = np.concatenate([piece, np.zeros(2, np.uint8)])
    escapes = piece == ord("%")
    high, low = _HEX[padded[1:-1]][escapes], _HEX[padded[2:]][escapes]
    if (np.maximum(high, low) > 15).any():
        raise InvalidImage("the data: URL has a % without two hexadecimal digits: write it as %25")
    shown, kept = piece.copy(), np.ones(len(padded), bool)
    shown[escapes] = high << 4 | low
    kept[1:-1][escapes] = kept[2:][escapes] = False
    return shown[kept[:-2]].tobytes()


def _from_base64(raw: bytes) -> bytes:
    try:
        return binascii.a2b_base64(raw, strict_mode=True)
    except binascii.Error:
        hint = ": it is base64url" if b"-" in raw or b"_" in raw else ""
        raise InvalidImage(
            f"the data: URL holds no valid base64{hint}: use the standard alphabet, padding and "
            "no line breaks"
        ) from None


def _check_bytes(num_bytes: int, limits: ImageLimits) -> None:
    if num_bytes > limits.image_bytes:
        raise _too_large(limits)


def _too_large(limits: ImageLimits) -> ImageTooLarge:
    return ImageTooLarge(
        f"the image file is larger than {amount(limits.image_bytes)} (--max-image-bytes)"
    )
