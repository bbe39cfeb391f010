"""Processors without transformers make of every image what transformers' make, to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.tiny_processors import SPECS, make_processor_files, vision_info

from plait.platform.config import Options
from plait.platform.text.tokenizer import Tokenizer
from plait.vision import pixel_library, plain
from plait.vision.decode import DecodedImage
from plait.vision.later import LaterProcessor, processor_of
from plait.vision.plain import PlainProcessor, PlainRecipe, recipe_for
from plait.vision.processor import ImageProcessor

PLAIN = ("llava", "paligemma")
SIZES = ((5, 5), (16, 16), (15, 17), (40, 27), (27, 40), (12, 390), (390, 12), (640, 481))
SIDES = {"height": 20, "width": 12}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sides": ("llava", {"size": SIDES, "do_center_crop": False}),
    "sides, cropped": ("llava", {"size": SIDES, "crop_size": {"height": 8, "width": 12}}),
    "shorter side": ("llava", {"size": {"shortest_edge": 19}}),
    "bilinear": ("paligemma", {"resample": 2}),
    "lanczos": ("paligemma", {"resample": 1}),
    "own normalisation": (
        "paligemma",
        {"image_mean": [0.1, 0.5, 0.3], "image_std": [0.9, 0.25, 0.7], "rescale_factor": 0.0123},
    ),
}
MORE: dict[str, dict[str, Any]] = {
    "nearest": {"resample": 0},
    "no normalisation": {"do_normalize": False},
    "a crop beyond the image": {"size": {"shortest_edge": 12}},
    "as it comes": {"do_resize": False},
}


def processor(tmp_path: Path, family: str, **settings: Any) -> tuple[ImageProcessor, Tokenizer]:
    make_processor_files(family, tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    tokenizer = Tokenizer.load(tmp_path)
    return ImageProcessor.load(tmp_path, tokenizer, vision_info(family, tokenizer)), tokenizer


def images() -> list[DecodedImage]:
    noise = np.random.default_rng(7)
    return [
        DecodedImage(
            pixels=noise.integers(0, 256, (*size, 3), dtype=np.uint8), digest=f"{size}", form="png"
        )
        for size in SIZES
    ]


@pytest.mark.parametrize("name", SETTINGS)
def test_tensors_text_and_keys_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, settings = SETTINGS[name]
    own, _ = processor(tmp_path, family, **settings)
    recipe = recipe_for(own)
    assert recipe is not None
    assert PlainRecipe.of(recipe.note) == recipe
    digest = own._identity.split("\0")[0]
    ours = PlainProcessor(recipe, own.vision, digest=digest, **own.facts)
    with own.by_transformers_alone():
        for image in images():
            assert ours.process_blocking([image]) == own.process_blocking([image]), image.digest


@pytest.mark.parametrize("name", MORE)
def test_whatever_does_more_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    own, _ = processor(tmp_path, "llava", **MORE[name])
    assert recipe_for(own) is None


def test_families_with_tiles_grids_or_classes_of_their_own_are_left_to_transformers(
    tmp_path: Path,
) -> None:
    for family in SPECS.keys() - set(PLAIN):
        own, _ = processor(tmp_path / family, family)
        assert recipe_for(own) is None, family


def test_one_that_differs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = processor(tmp_path, "llava")
    right = pixel_library.resize_rgb
    for wrong in (lambda *a, **k: right(*a, **k) ^ 1, lambda *a, **k: None):
        monkeypatch.setattr(pixel_library, "resize_rgb", wrong)
        assert recipe_for(own) is None
    monkeypatch.setattr(pixel_library, "resize_rgb", right)
    assert recipe_for(own) is not None
    monkeypatch.setattr(plain.pixel_library, "library", lambda: None)
    assert recipe_for(own) is None


def test_a_later_start_brings_neither_torch_nor_transformers(tmp_path: Path) -> None:
    checkpoint, cache = tmp_path / "checkpoint", tmp_path / "cache"
    own, tokenizer = processor(checkpoint, "llava")
    options = Options(model=str(checkpoint), packed_cache=str(cache))
    model: Any = SimpleNamespace(name="tiny", vision=own.vision)
    first = processor_of(model, options, tokenizer)
    assert isinstance(first, PlainProcessor)
    (image,) = images()[3:4]
    program = f"""
import sys
from types import SimpleNamespace
import numpy as np
from plait.platform.config import Options, VisionInfo
from plait.platform.text.tokenizer import Tokenizer
from plait.vision.decode import DecodedImage
from plait.vision.later import processor_of
checkpoint = {str(checkpoint)!r}
options = Options(model=checkpoint, packed_cache={str(cache)!r})
model = SimpleNamespace(name="tiny", vision={own.vision!r})
processor = processor_of(model, options, Tokenizer.load(checkpoint))
pixels = np.frombuffer(bytes.fromhex(sys.stdin.read()), np.uint8).reshape({image.pixels.shape})
image = DecodedImage(pixels=pixels, digest={image.digest!r}, form="png")
(made,) = processor.process_blocking([image])
brought = {{"torch", "transformers"}} & set(sys.modules)
print(made.key, made.tensors["pixel_values"].data.hex(), *brought)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=image.pixels.tobytes().hex(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    (wanted,) = first.process_blocking([image])
    assert done.stdout.split() == [wanted.key, wanted.tensors["pixel_values"].data.hex()]


def test_what_does_more_is_made_later_at_later_starts(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    own, tokenizer = processor(checkpoint, "idefics3")
    options = Options(model=str(checkpoint), packed_cache=str(tmp_path / "cache"))
    model: Any = SimpleNamespace(name="tiny", vision=own.vision)
    assert isinstance(processor_of(model, options, tokenizer), ImageProcessor)
    later = processor_of(model, options, tokenizer)
    assert isinstance(later, LaterProcessor)
    assert later.process_blocking(images()[:2]) == own.process_blocking(images()[:2])


def test_an_image_is_counted_as_what_it_takes(tmp_path: Path) -> None:
    # LLaVA's own count takes a crop for granted, and so refused prompts that fit.
    size = {"height": 8, "width": 8}
    own, tokenizer = processor(tmp_path, "llava", do_center_crop=False, size=size)
    options = Options(model=str(tmp_path), packed_cache="off")
    model: Any = SimpleNamespace(name="tiny", vision=own.vision)
    served = processor_of(model, options, tokenizer)
    assert served is not None
    for image in images():
        (made,) = served.process_blocking([image])
        assert served.count(image.height, image.width) == made.num_embeds == 4


def test_the_library_refuses_what_its_kernels_do_not_check() -> None:
    good = np.zeros((4, 4, 3), np.uint8)
    for pixels in (good[:0], good[..., :2], good.astype(np.int8)):
        with pytest.raises(RuntimeError, match="uint8"):
            pixel_library.resize_rgb(pixels, (2, 2), 3, down_first=False)
        with pytest.raises(RuntimeError, match="uint8"):
            pixel_library.pixel_planes(pixels, np.zeros((3, 256), np.float32))
    for size, resample in (((0, 2), 3), ((2, 2), 0), ((2, 2), 4)):
        with pytest.raises(RuntimeError, match="filter"):
            pixel_library.resize_rgb(good, size, resample, down_first=False)
    with pytest.raises(RuntimeError, match="table"):
        pixel_library.pixel_planes(good, np.zeros((3, 256), np.float64))
