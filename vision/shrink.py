"""`detail: "low"`: the image is made small before the model's own processor sees it.

`auto` and `high` leave it to the processor, whose rules are the model's training's.
"""

from __future__ import annotations

import hashlib

import numpy as np
from PIL import Image

from plait.vision.decode import DecodedImage

LOW_SIDE = 512  # of the longer side, as OpenAI's


def low_detail(image: DecodedImage) -> DecodedImage:
    """The image with its longer side at most `LOW_SIDE`; the image itself where it is small."""
    longer = max(image.width, image.height)
    if longer <= LOW_SIDE:
        return image
    size = tuple(max(1, round(side * LOW_SIDE / longer)) for side in (image.width, image.height))
    small = Image.fromarray(image.pixels).resize((size[0], size[1]), Image.Resampling.BICUBIC)
    pixels = np.array(small)
    pixels.setflags(write=False)
    digest = hashlib.sha256(f"low {LOW_SIDE} bicubic {image.digest}".encode()).hexdigest()
    return DecodedImage(pixels=pixels, digest=digest, form=image.form)
