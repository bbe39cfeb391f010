"""Images a second of a model: preparing them and encoding them, each in one thread."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Column, Table

from plait.platform.bench.stats import median
from plait.platform.config import Options
from plait.platform.errors import ConfigError

if TYPE_CHECKING:
    from plait.vision.decode import DecodedImage

SIZES = ("1184x848", "2368x1696")  # of 1 and 4 megapixels
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")


def parse_size(text: str) -> tuple[int, int]:
    """Width and height of `WIDTHxHEIGHT`. Raises `ConfigError`."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--image-size {text} is no size: write 1184x848", param="image_sizes")
    return int(found[1]), int(found[2])


def measure(
    options: Options, sizes: Sequence[tuple[int, int]], repeats: int
) -> Iterator[dict[str, Any]]:
    """Figures for each size: medians of the calling thread's processor seconds.

    Raises `ConfigError` where the model takes no images, and what loading it raises.
    """
    import torch

    from plait.platform.model import load_model
    from plait.platform.text.tokenizer import Tokenizer
    from plait.vision.later import processor_of
    from plait.vision.placing import place

    torch.set_num_threads(1)
    loaded = load_model(options)
    tokenizer = Tokenizer.load(loaded.tokenizer_source)
    processor = processor_of(loaded.info, options, tokenizer)
    if processor is None:
        raise ConfigError(f"{loaded.info.name} takes no images: name a model that does")
    try:
        for width, height in sizes:
            image = _picture(width, height)
            (made,) = processor.process_blocking([image])
            prepare_s = _time(partial(processor.make_anew, image), repeats)
            ids = tokenizer.encode(made.text, add_special_tokens=False)
            items = place(ids, [made], processor.vision).items
            encode_s = _time(partial(loaded.executor.encode, items, ()), repeats)
            yield {
                "width": width,
                "height": height,
                "embeddings": made.num_embeds,
                "prepare_ms": prepare_s * 1e3,
                "encode_ms": encode_s * 1e3,
            }
    finally:
        processor.close()


def table(results: Sequence[dict[str, Any]]) -> Table:
    """One row for each size."""
    shown = Table(
        "image",
        *(
            Column(title, justify="right")
            for title in ("embeddings", "prepare ms", "encode ms", "images/s")
        ),
        caption="one thread, medians; prepare: decoded pixels to tensors; encode: the tower",
    )
    for result in results:
        shown.add_row(
            f"{result['width']} × {result['height']}",
            f"{result['embeddings']:,}",
            f"{result['prepare_ms']:.1f}",
            f"{result['encode_ms']:.1f}",
            f"{1e3 / (result['prepare_ms'] + result['encode_ms']):.2f}",
        )
    return shown


def _picture(width: int, height: int) -> DecodedImage:
    """Noise over a gradient: what a resize and an encoder cost does not depend on the picture."""
    from plait.vision.decode import DecodedImage

    noise = np.random.default_rng(0).integers(0, 128, (height, width, 3), dtype=np.uint8)
    pixels = noise + np.linspace(0, 127, width, dtype=np.uint8)[:, None]
    return DecodedImage(pixels=pixels, digest=f"bench {width}x{height}", form="pixels")


def _time(run: Callable[[], object], repeats: int) -> float:
    """Median of the calling thread's seconds, after one run that is not counted."""
    run()
    taken = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        taken.append(time.thread_time() - start)
    return median(taken)
