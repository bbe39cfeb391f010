"""Bounds on the images of a request. Over a bound the request is refused, with the number."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
MAX_PIXELS = 100_000_000  # no setting goes beyond; Pillow has a bound of its own above this
# Of images as models read them: of one request, and of all requests that run or wait.
PROCESSED_BYTES = 1024 * MIB
HELD_BYTES = 2 * PROCESSED_BYTES
# What base64 makes of the images, and the rest of the chat.
_TEXT_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What images may cost. Sizes are checked against a file's header, before anything is decoded.

    An image that is being decoded takes up to 12 bytes a pixel, a decoded one 3; files and decoded
    images of all requests together stay under the two budgets.
    """

    num_images: int = 16  # of one request
    image_bytes: int = 20 * MIB  # of one file
    request_bytes: int = 64 * MIB  # of all files of a request
    image_pixels: int = 33_177_600  # 8K: 7680 × 4320
    image_side: int = 32_768  # of the longer side
    request_pixels: int = 134_217_728  # of all images of a request
    file_budget_bytes: int = 256 * MIB  # files of all requests that are being prepared
    pixel_budget_bytes: int = 1024 * MIB  # decoded images that anybody still holds
    wait_s: float = 30.0  # for room in the budgets, then 503
    fetch_s: float = 5.0  # for one address, redirects and all
    redirects: int = 3
    num_fetches: int = 16  # at a time
    url_chars: int = 8192
    num_threads: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.image_pixels <= MAX_PIXELS:
            raise ValueError(f"the bound on an image's pixels lies in [1, {MAX_PIXELS}]")
        if self.request_bytes > self.file_budget_bytes:
            raise ValueError("one request's files do not fit the budget for all files")
        if 3 * max(self.request_pixels, self.image_pixels) > self.pixel_budget_bytes:
            raise ValueError("one request's pixels do not fit the budget for all pixels")

    @property
    def body_bytes(self) -> int:
        """Bytes of a JSON body in which all files of a request travel as base64."""
        return -(-self.request_bytes // 3) * 4 + _TEXT_BYTES


def amount(num_bytes: int) -> str:
    """Bytes as messages tell them."""
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes} bytes"
