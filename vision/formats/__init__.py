"""Image files, told apart by their first bytes and read as far as their structure.

Four formats are taken. Sizes come from here, before any decoder allocates for them.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.platform.errors import InvalidImage
from plait.vision.formats import gif, jpeg, png, webp
from plait.vision.formats.container import Container

__all__ = ["Container", "read_container"]

_TAKEN = "send PNG, JPEG, WebP or GIF"
# First bytes of what is refused, so that the message can name it.
_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"BM", "BMP"),
    (b"\0\0\1\0", "ICO"),
    (b"8BPS", "Photoshop"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"\x1a\x45\xdf\xa3", "Matroska or WebM video"),
    (b"FLV\x01", "Flash video"),
    (b"\0\0\x01\xba", "MPEG video"),
    (b"\0\0\x01\xb3", "MPEG video"),
    (b"OggS", "Ogg"),
    (b"PK\x03\x04", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    (b"qoif", "QOI"),
)
_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"hevc": "HEIC",
    b"mif1": "HEIF",
    b"msf1": "HEIF",
}
_RIFF = {b"AVI ": "AVI video", b"WAVE": "WAV audio"}
_SNIFFED = 1024


def read_container(data: bytes) -> Container:
    """The structure of an image file. Raises `InvalidImage`, naming a format that is not taken."""
    reader = _reader(data)
    if reader is None:
        found = _name(data)
        what = "it is empty" if not data else "no known format"
        raise InvalidImage(
            f"{found} is not taken as an image: {_TAKEN}"
            if found
            else f"this is no image ({what}): {_TAKEN}"
        )
    return reader(data)


def _reader(data: bytes) -> Callable[[bytes], Container] | None:
    if data.startswith(png.MAGIC):
        return png.read
    if data.startswith(jpeg.MAGIC):
        return jpeg.read
    if data.startswith(gif.MAGIC):
        return gif.read
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return webp.read
    return None


def _name(data: bytes) -> str | None:
    for magic, name in _OTHERS:
        if data.startswith(magic):
            return name
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "MP4 or QuickTime video")
    if data.startswith(b"RIFF"):
        return _RIFF.get(data[8:12])
    start = data[:_SNIFFED].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "HTML"
    if b"<svg" in start:
        return "SVG"
    if start.startswith((b"<?xml", b"<")):
        return "XML"
    return None
