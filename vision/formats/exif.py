"""The one fact that is read of an Exif block: how the camera was held."""

from __future__ import annotations

import struct

_ORIENTATION = 0x0112
_SHORT = 3
_MAX_ENTRIES = 1024


def orientation(block: bytes) -> int:
    """Exif's orientation, 1 to 8; 1 (upright) where the block says nothing valid of it.

    `block` is a TIFF structure, with or without JPEG's prefix.
    """
    block = block.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return 1
    try:
        magic, offset = struct.unpack_from(order + "HI", block, 2)
        (num_entries,) = struct.unpack_from(order + "H", block, offset)
        if magic != 42:
            return 1
        for index in range(min(num_entries, _MAX_ENTRIES)):
            at = offset + 2 + 12 * index
            tag, kind, count, value = struct.unpack_from(order + "HHIH", block, at)
            if tag == _ORIENTATION:
                valid = kind == _SHORT and count == 1 and 1 <= value <= 8
                return int(value) if valid else 1
    except struct.error:
        return 1
    return 1
