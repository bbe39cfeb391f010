"""Images of every odd kind, made in memory."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def picture(width: int = 48, height: int = 32, seed: int = 0) -> Image.Image:
    """A smooth picture with some noise: compresses, yet each part of it differs."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    channels = [x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x + y) * 3 % 256]
    noise = rng.integers(0, 16, (height, width, 3))
    return Image.fromarray(np.clip(np.stack(channels, 2) + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def chunk(kind: bytes, body: bytes) -> bytes:
    """One chunk of a PNG file."""
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def png(*chunks: bytes) -> bytes:
    return PNG_MAGIC + b"".join(chunks) + chunk(b"IEND", b"")


def png_rows(rows: np.ndarray) -> bytes:
    """The data chunk of rows of bytes, unfiltered."""
    flat = b"".join(b"\0" + row.tobytes() for row in rows)
    return chunk(b"IDAT", zlib.compress(flat))


def with_checksums(data: bytes) -> bytes:
    """A PNG whose chunks have the checksums that fit what they hold now."""
    fixed, at = bytearray(data), len(PNG_MAGIC)
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 > len(data):
            break
        fixed[end : end + 4] = struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4
    return bytes(fixed)


def with_text_bomb(data: bytes, megabytes: int) -> bytes:
    """A PNG with a text and a profile that unpack to so much."""
    body = zlib.compress(b"\0" * (megabytes << 20), 1)
    bombs = chunk(b"zTXt", b"bomb\0\0" + body) + chunk(b"iCCP", b"bomb\0\0" + body)
    after_header = len(PNG_MAGIC) + 25
    return data[:after_header] + bombs + data[after_header:]


def empty_png(width: int, height: int) -> bytes:
    """A black PNG that is tiny for its size, made without holding its pixels."""
    packer = zlib.compressobj(1)
    row = b"\0" * (1 + 3 * width)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png(header(width, height), chunk(b"IDAT", body))


def exif(orientation: int, order: str = "<") -> bytes:
    mark = b"II" if order == "<" else b"MM"
    entry = struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"Exif\0\0" + mark + struct.pack(order + "HIH", 42, 8, 1) + entry + b"\0\0\0\0"


def many_scans(data: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + data[-2:]


def gif_frame(canvas: tuple[int, int], box: tuple[int, int, int, int], frame: Image.Image) -> bytes:
    """A GIF whose only frame covers `box` (left, top, width, height) of its canvas."""
    plain = encoded(frame, "GIF")
    at = plain.rindex(b"\x2c" + struct.pack("<HHHH", 0, 0, box[2], box[3]))
    return (
        plain[:6]
        + struct.pack("<HH", *canvas)
        + plain[10 : at + 1]
        + struct.pack("<HHHH", *box)
        + plain[at + 9 :]
    )
