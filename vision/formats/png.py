"""PNG: chunks. Those that decide pixels are kept, each checked against its own checksum."""

from __future__ import annotations

import struct
import zlib

from plait.vision.formats.container import Container, cut_short, damaged
from plait.vision.formats.exif import orientation

MAGIC = b"\x89PNG\r\n\x1a\n"
_KEPT = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
_MAX_CHUNKS = 65_536
_LENGTH_AND_TYPE = struct.Struct(">I4s")


def read(data: bytes) -> Container:
    """The structure of a PNG file. Of an animated one, the image that other viewers show.

    Texts and profiles, which may unpack to gigabytes, are left out unread.
    Raises `InvalidImage`.
    """
    kept: list[memoryview | bytes] = [MAGIC]
    view, at, turned = memoryview(data), len(MAGIC), 1
    size: tuple[int, int, int] | None = None
    for _ in range(_MAX_CHUNKS):
        if at + 12 > len(data):
            raise cut_short("PNG")
        length, kind = _LENGTH_AND_TYPE.unpack_from(data, at)
        end = at + 12 + length
        if end > len(data):
            raise cut_short("PNG")
        if size is None:
            size = _size(data, at, length, kind)
        if kind == b"eXIf":
            turned = orientation(bytes(view[at + 8 : end - 4]))
        if kind in _KEPT:
            if zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(view[end - 4 : end], "big"):
                raise damaged("PNG", f"the checksum of its {kind.decode()} part is wrong")
            kept.append(view[at:end])
        elif not kind[0] & 0x20:
            raise damaged("PNG", "it needs an extension that is not known here")
        at = end
        if kind == b"IEND":
            return Container(
                form="PNG",
                width=size[0],
                height=size[1],
                payload=b"".join(kept),
                orientation=turned,
                depth=size[2],
            )
    raise damaged("PNG", f"it has more than {_MAX_CHUNKS} parts")


def _size(data: bytes, at: int, length: int, kind: bytes) -> tuple[int, int, int]:
    if kind != b"IHDR" or length != 13:
        raise damaged("PNG", "it does not begin with a header")
    width, height, depth = struct.unpack_from(">IIB", data, at + 8)
    return width, height, depth
