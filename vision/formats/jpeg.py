"""JPEG: segments, then scans. Cameras' notes, previews and profiles are left out."""

from __future__ import annotations

import re

from plait.platform.errors import InvalidImage
from plait.vision.formats.container import Container, cut_short, damaged
from plait.vision.formats.exif import orientation

MAGIC = b"\xff\xd8\xff"
_MAX_SEGMENTS = 8192
# Each scan of a progressive file goes over all pixels; encoders write about ten. A file of a few
# kilobytes may hold thousands, which would take minutes.
_MAX_SCANS = 32
_SOI, _EOI, _SOS, _DNL, _APP0, _APP1, _APP14, _COMMENT = (
    0xD8, 0xD9, 0xDA, 0xDC, 0xE0, 0xE1, 0xEE, 0xFE,
)  # fmt: skip
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_LOSSLESS = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF})
_MARKER = re.compile(rb"\xff[^\x00\xff]", re.DOTALL)
# The next marker that ends entropy-coded data: neither a stuffed byte, a restart, nor a filler.
_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)


def read(data: bytes) -> Container:
    """The structure of a JPEG file, up to the end of its first image. Raises `InvalidImage`."""
    return _Reader(data).read()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._view = memoryview(data)
        self._kept: list[memoryview] = [self._view[:2]]
        self._size: tuple[int, int] | None = None
        self._turned: int | None = None

    def read(self) -> Container:
        at, num_scans = 2, 0
        for _ in range(_MAX_SEGMENTS):
            at, marker = self._marker(at)
            if marker == _EOI:
                return self._finished(num_scans)
            end = self._segment(at, marker)
            if marker == _SOS:
                num_scans += 1
                if num_scans > _MAX_SCANS:
                    raise InvalidImage(
                        f"the JPEG file has more than {_MAX_SCANS} scans: save it anew"
                    )
                found = _AFTER_SCAN.search(self._data, end)
                if found is None:
                    raise cut_short("JPEG")
                self._kept.append(self._view[end : found.start()])
                end = found.start()
            at = end
        raise damaged("JPEG", f"it has more than {_MAX_SEGMENTS} parts")

    def _marker(self, at: int) -> tuple[int, int]:
        """The next marker, and where it stands (its 0xFF). What lies before it is left out."""
        found = _MARKER.search(self._data, at)
        if found is None:
            raise cut_short("JPEG")
        return found.end() - 2, self._data[found.end() - 1]

    def _segment(self, at: int, marker: int) -> int:
        """Take up the segment of a marker at `at`; where it ends."""
        if marker == 0x01 or 0xD0 <= marker <= _SOI:
            raise damaged("JPEG", "a marker stands where it must not")
        if at + 4 > len(self._data):
            raise cut_short("JPEG")
        end = at + 2 + int.from_bytes(self._data[at + 2 : at + 4], "big")
        if end > len(self._data):
            raise cut_short("JPEG")
        body = self._view[at + 4 : end]
        if marker in _FRAMES:
            self._frame(marker, body)
        elif marker == _DNL:
            raise damaged("JPEG", "it tells its height only at its end")
        elif marker == _APP1 and self._turned is None and bytes(body[:6]) == b"Exif\0\0":
            self._turned = orientation(bytes(body))
        noise = _APP0 < marker < _APP14 or marker in (0xEF, _COMMENT)
        if not noise:
            self._kept.append(self._view[at:end])
        return end

    def _frame(self, marker: int, body: memoryview) -> None:
        if self._size is not None:
            raise damaged("JPEG", "it has two headers")
        if len(body) < 6:
            raise damaged("JPEG", "its header is too short")
        if marker in _LOSSLESS or body[0] != 8:
            raise InvalidImage(
                "a lossless or 12-bit JPEG is not taken: save it as PNG, or as an ordinary JPEG"
            )
        self._size = int.from_bytes(body[3:5], "big"), int.from_bytes(body[1:3], "big")

    def _finished(self, num_scans: int) -> Container:
        if self._size is None or num_scans == 0:
            raise damaged("JPEG", "there is no image in it")
        return Container(
            form="JPEG",
            width=self._size[0],
            height=self._size[1],
            payload=b"".join([*self._kept, b"\xff\xd9"]),
            orientation=self._turned or 1,
        )
