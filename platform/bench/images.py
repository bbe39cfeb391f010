"""Images a second of a model: preparing them (in threads of their own) and encoding them.

python -m plait.platform.bench.images MODEL [--dtype bfloat16] [--size 1184x848 …] [--repeats 5]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from plait.platform.bench.stats import median
from plait.platform.config import Options

if TYPE_CHECKING:
    from plait.vision.decode import DecodedImage

_SIZES = ("1184x848", "2368x1696")  # of 1 and 4 megapixels


def main() -> int:
    """Print one line for each size: medians of the calling thread's processor time."""
    arguments = _arguments()
    import torch

    from plait.platform.model.load import load_model
    from plait.platform.tokenizer import Tokenizer
    from plait.vision.placing import place
    from plait.vision.processor import ImageProcessor

    torch.set_num_threads(1)
    options = Options(model=arguments.model, dtype=arguments.dtype)
    loaded = load_model(options)
    tokenizer = Tokenizer.load(loaded.tokenizer_source)
    processor = ImageProcessor.of_model(loaded.info, options, tokenizer)
    if processor is None:
        sys.exit(f"{arguments.model} takes no images")
    for size in arguments.size or _SIZES:
        image = _picture(*(int(side) for side in size.split("x")))
        made = processor.process_blocking([image])[0]
        # What is kept would answer at once: the work itself is measured.
        _, make = processor._asked(image, alone=True)
        prepare_s = _time(make, arguments.repeats)
        token_ids = tokenizer.encode(made.text, add_special_tokens=False)
        items = place(token_ids, [made], processor.vision).items
        encode_s = _time(partial(loaded.executor.encode, items, ()), arguments.repeats)
        sys.stdout.write(
            f"{size}: {made.num_embeds} embeddings; prepare {prepare_s * 1e3:.1f} ms "
            f"({1 / prepare_s:.1f}/s), encode {encode_s * 1e3:.1f} ms ({1 / encode_s:.2f}/s)\n"
        )
    processor.close()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory or a name on the hub")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--size", action="append", metavar="WxH")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


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


if __name__ == "__main__":
    sys.exit(main())
