"""WebP: the size that the decoder will allocate, and that the file is whole."""

from __future__ import annotations

import struct

from plait.vision.formats.container import Container, cut_short, damaged
from plait.vision.formats.exif import orientation

_MAX_CHUNKS = 65_536


def read(data: bytes) -> Container:
    """The structure of a WebP file. Raises `InvalidImage`."""
    if len(data) < 30:
        raise cut_short("WebP")
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise cut_short("WebP")
    width, height = _size(data)
    return Container(
        form="WebP",
        width=width,
        height=height,
        payload=data[:end],
        orientation=_orientation(data[:end]),
    )


def _size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return width, height
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        wide, high = struct.unpack_from("<HH", data, 26)
        return wide & 0x3FFF, high & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise damaged("WebP", "it does not begin with a header")


def _orientation(data: bytes) -> int:
    at = 12
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            return 1
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"EXIF":
            return orientation(data[at + 8 : at + 8 + length])
        at += 8 + length + (length & 1)
    raise damaged("WebP", f"it has more than {_MAX_CHUNKS} parts")
