"""What the readers of the four formats have in common."""

from __future__ import annotations

from dataclasses import dataclass

from plait.platform.errors import InvalidImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """An image file, read as far as its structure: nothing is decoded yet.

    `payload` is the file with all left out that decides no pixel of the first frame: texts, colour
    profiles, previews, later frames. What a decoder never sees cannot harm it.
    """

    form: str  # "PNG" | "JPEG" | "GIF" | "WebP"
    width: int  # as stored, before `orientation`
    height: int
    payload: bytes
    orientation: int = 1  # Exif's: 1 to 8
    depth: int = 8  # bits a channel
    # Where the payload's pixels stand in the image; None: they are the image.
    frame: tuple[int, int, int, int] | None = None  # left, top, width, height


def cut_short(form: str) -> InvalidImage:
    """The error for a file that ends before its image does."""
    return InvalidImage(f"the {form} file is cut short: send all of it")


def damaged(form: str, what: str) -> InvalidImage:
    """The error for a file that breaks its format's rules."""
    return InvalidImage(f"the {form} file is damaged: {what}")
