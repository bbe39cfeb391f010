"""From a file's bytes to RGB pixels, within bounds.

The format is told by the first bytes, the size by the header, and Pillow gets only what decides
the pixels of the first frame (`plait.vision.formats`), by one decoder that is named: no other can
be reached. What comes out:

- 8 bits a channel; of 16-bit files the upper 8
- transparency laid on white
- Exif's orientation applied
- of animations the first frame, on the whole canvas
- colour profiles ignored, as the models' own training did; CMYK by the plain formula

Whatever goes wrong is an `InvalidImage`, in words that hold nothing of this machine.
"""

from __future__ import annotations

import hashlib
import io
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import (
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
    features,
)

from plait.platform.errors import ImageTooLarge, InvalidImage
from plait.vision.flatten import flatten
from plait.vision.formats import Container, read_container
from plait.vision.limits import MAX_PIXELS, ImageLimits, amount

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

log = logging.getLogger("plait.vision")

_DECODERS: dict[str, type[ImageFile]] = {
    "PNG": PngImagePlugin.PngImageFile,
    "JPEG": JpegImagePlugin.JpegImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
}
# All that decides pixels beside the file: grows with every change of the rules above.
_RULES = "rgb-1 " + " ".join(
    [f"pillow-{PIL.__version__}", *(f"{m}-{features.version(m)}" for m in ("jpg", "zlib", "webp"))]
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedImage:
    """One image as pixels. `pixels` is uint8 [H, W, 3], RGB, and cannot be written to.

    `digest` is a SHA-256 (hex) over the file (or the pixels that were given) and over all that
    decided what became of it: equal digests mean equal pixels, after a restart too.
    """

    pixels: np.ndarray
    digest: str
    form: str  # "PNG" | "JPEG" | "GIF" | "WebP" | "pixels"

    @property
    def width(self) -> int:
        """Columns."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """Rows."""
        return int(self.pixels.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFileInfo:
    """A file that was read as far as its header, within the bounds."""

    container: Container
    digest: str

    @property
    def num_pixels(self) -> int:
        """Pixels that it decodes to."""
        return self.container.width * self.container.height


def inspect(data: bytes, limits: ImageLimits) -> ImageFileInfo:
    """Check all that can be checked before decoding. Raises `InvalidImage`, `ImageTooLarge`."""
    if len(data) > limits.image_bytes:
        raise ImageTooLarge(
            f"the image file has {amount(len(data))}; at most {amount(limits.image_bytes)} are "
            "taken (--max-image-bytes)"
        )
    container = read_container(data)
    check_size(container.width, container.height, limits)
    if container.frame is not None:
        check_size(*container.frame[2:], limits)
    digest = hashlib.sha256(_RULES.encode() + b"\0")
    digest.update(data)
    return ImageFileInfo(container=container, digest=digest.hexdigest())


def check_size(width: int, height: int, limits: ImageLimits) -> None:
    """Raises `ImageTooLarge` beyond a bound, `InvalidImage` where there is nothing to see."""
    if width < 1 or height < 1:
        raise InvalidImage(f"the image has no pixels: it is {width} × {height}")
    if width * height > limits.image_pixels:
        raise ImageTooLarge(
            f"the image is {width} × {height}: more than {limits.image_pixels} pixels "
            "(--max-image-pixels). Send it smaller"
        )
    if max(width, height) > limits.image_side:
        raise ImageTooLarge(
            f"the image is {width} × {height}: no side may be longer than {limits.image_side}"
        )


def decode(info: ImageFileInfo) -> DecodedImage:
    """The pixels of an inspected file. Raises `InvalidImage`."""
    container = info.container
    try:
        pixels = _pixels(container)
    except (InvalidImage, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise whatever a broken file makes them meet
        log.debug("an image was refused", exc_info=True)
        raise InvalidImage(
            f"the {container.form} file cannot be decoded: {_reason(error)}"
        ) from None
    pixels.setflags(write=False)
    return DecodedImage(pixels=pixels, digest=info.digest, form=container.form)


def decode_bytes(data: bytes, limits: ImageLimits) -> DecodedImage:
    """`inspect`, then `decode`."""
    return decode(inspect(data, limits))


def guard_process() -> None:
    """Let Pillow itself refuse, in this whole process, what should never come that far.

    For processes that are ours alone: in others its settings belong to the user.
    """
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS
    warnings.filterwarnings("error", module=r"PIL(\.|$)")
    warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


def _pixels(container: Container) -> np.ndarray:
    left, top, width, height = container.frame or (0, 0, container.width, container.height)
    with _DECODERS[container.form](io.BytesIO(container.payload)) as image:
        if image.size != (width, height):
            raise InvalidImage(f"the {container.form} file contradicts itself about its size")
        image.load()
        pixels = flatten(image, container.depth)
    if container.frame is not None and container.frame != (0, 0, container.width, container.height):
        pixels = _on_canvas(pixels, left, top, container)
    return upright(pixels, container.orientation)


def _on_canvas(pixels: np.ndarray, left: int, top: int, container: Container) -> np.ndarray:
    canvas = np.full((container.height, container.width, 3), 255, np.uint8)
    shown = pixels[: max(0, container.height - top), : max(0, container.width - left)]
    if shown.size:
        canvas[top : top + shown.shape[0], left : left + shown.shape[1]] = shown
    return canvas


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels as the camera's holder saw them.

    Exif's 2 to 4 mirror or turn by half; 5 to 8 do the same after rows became columns.
    """
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _reason(error: Exception) -> str:
    """A short reason in our own words: a decoder's may hold addresses and paths."""
    text = str(error).lower()
    if "truncat" in text or isinstance(error, EOFError):
        return "its data end too early"
    if "mode" in text or isinstance(error, NotImplementedError):
        return "its kind of pixels is not known"
    return "its data are damaged"
