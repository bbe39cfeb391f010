"""GIF: the first frame is taken out as a file of its own."""

from __future__ import annotations

import struct

from plait.vision.formats.container import Container, cut_short, damaged

MAGIC = (b"GIF87a", b"GIF89a")
_MAX_BLOCKS = 1 << 18  # sub-blocks hold up to 255 bytes: a full file has 82,000
_EXTENSION, _IMAGE, _TRAILER, _CONTROL = 0x21, 0x2C, 0x3B, 0xF9


def read(data: bytes) -> Container:
    """The first frame of a GIF file. Raises `InvalidImage`."""
    return _Reader(data).read()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_blocks = 0

    def read(self) -> Container:
        if len(self._data) < 13:
            raise cut_short("GIF")
        width, height, flags = struct.unpack_from("<HHB", self._data, 6)
        at = colours_end = 13 + _table_bytes(flags)
        control = b""
        while True:
            kind = self._byte(at)
            if kind == _EXTENSION:
                end = self._blocks_end(at + 2)
                if self._byte(at + 1) == _CONTROL:
                    control = self._data[at:end]
                at = end
            elif kind == _IMAGE:
                break
            elif kind == _TRAILER:
                raise damaged("GIF", "there is no image in it")
            else:
                raise damaged("GIF", "something stands between its parts")
        return self._frame(at, (width, height), self._data[13:colours_end], control)

    def _frame(self, at: int, canvas: tuple[int, int], colours: bytes, control: bytes) -> Container:
        self._byte(at + 9)
        left, top, width, height, flags = struct.unpack_from("<HHHHB", self._data, at + 1)
        start = at + 10 + _table_bytes(flags)
        end = self._blocks_end(start + 1)
        # As a file whose screen is the frame: what the frame leaves bare is ours to fill.
        screen = b"GIF89a" + struct.pack("<HH", width, height) + self._data[10:11] + b"\0\0"
        image = b"\x2c" + struct.pack("<HHHH", 0, 0, width, height) + self._data[at + 9 : end]
        return Container(
            form="GIF",
            width=canvas[0],
            height=canvas[1],
            payload=b"".join([screen, colours, control, image, b"\x3b"]),
            frame=(left, top, width, height),
        )

    def _byte(self, at: int) -> int:
        if at >= len(self._data):
            raise cut_short("GIF")
        return self._data[at]

    def _blocks_end(self, at: int) -> int:
        """Where the sub-blocks that begin at `at` end."""
        while length := self._byte(at):
            at += 1 + length
            self._num_blocks += 1
            if self._num_blocks > _MAX_BLOCKS:
                raise damaged("GIF", f"it has more than {_MAX_BLOCKS} parts")
        return at + 1


def _table_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
