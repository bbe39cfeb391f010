"""Quick processors make of every image what transformers' own make, to the last bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from support.tiny_processors import SPECS, make_processor_files, vision_info

from plait.platform.text.tokenizer import Tokenizer
from plait.vision import quick
from plait.vision.decode import DecodedImage
from plait.vision.processor import ImageProcessor
from plait.vision.quick import quickened

# As checkpoints of each family have them, but for fewer tiles where they are many.
_SQUARE = {"height": 336, "width": 336}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("CLIP", {"size": {"shortest_edge": 336}, "crop_size": _SQUARE}),
    "llava_pixtral": (
        "Pixtral",
        {"size": {"longest_edge": 256}, "patch_size": {"height": 16, "width": 16}},
    ),
    "llava_next": (
        "LlavaNext",
        {
            "size": {"shortest_edge": 336},
            "crop_size": _SQUARE,
            "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672]],
        },
    ),
    "llava_onevision": (
        "LlavaOnevision",
        {
            "size": {"height": 384, "width": 384},
            "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384]],
        },
    ),
    "qwen2_vl": ("Qwen2VL", {"size": {"shortest_edge": 56 * 56, "longest_edge": 448 * 448}}),
    "glm4v": ("Glm4v", {"size": {"shortest_edge": 112 * 112, "longest_edge": 448 * 448}}),
    "glm46v": ("Glm46V", {"size": {"shortest_edge": 112 * 112, "longest_edge": 448 * 448}}),
    "gemma3": ("Gemma3", {"size": {"height": 224, "width": 224}}),
    "gemma3 with crops": (
        "Gemma3",
        {
            "size": {"height": 112, "width": 112},
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 30,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
    ),
    "paligemma": ("Siglip", {"size": {"height": 224, "width": 224}}),
    "idefics3": (
        "Idefics3",
        {"size": {"longest_edge": 728}, "max_image_size": {"longest_edge": 364}},
    ),
    "smolvlm": (
        "SmolVLM",
        {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 256}},
    ),
    "internvl": (
        "GotOcr2",
        {"size": {"height": 224, "width": 224}, "max_patches": 6, "crop_to_patches": True},
    ),
}
SIZES = ((300, 211), (40, 400), (401, 37), (1, 1), (3, 3), (90, 3), (3, 90), (500, 500))


def made_by(processor: Any, image: Any) -> dict[str, np.ndarray] | str:
    """All tensors; where the image is refused, by which error."""
    try:
        made = processor([image], return_tensors="np")
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return type(error).__name__
    return {name: np.asarray(value) for name, value in made.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_tensors_are_those_of_transformers(name: str) -> None:
    kind, settings = SETTINGS[name]
    own = getattr(transformers, f"{kind}ImageProcessorPil")(**settings)
    fast = quickened(own)
    assert fast is not None
    rng = np.random.default_rng(0)
    for width, height in SIZES:
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        wanted, found = made_by(own, Image.fromarray(pixels)), made_by(fast, pixels)
        if isinstance(wanted, str):
            assert isinstance(found, str)
            continue
        assert not isinstance(found, str)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key].dtype == value.dtype
            assert np.array_equal(found[key], value), (key, width, height)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("quick")
    for family in SPECS:
        make_processor_files(family, directory / family)
    return directory


def load(family: str, root: Path) -> ImageProcessor:
    tokenizer = Tokenizer.load(root / family)
    return ImageProcessor.load(root / family, tokenizer, vision_info(family, tokenizer))


@pytest.mark.parametrize("family", SPECS)
def test_every_family_is_processed_quickly_and_alike(
    family: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = load(family, root)
    assert fast._is_quick
    monkeypatch.setattr(quick, "quickened", lambda images: None)
    own = load(family, root)
    assert not own._is_quick
    pixels = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
    image = DecodedImage(pixels=pixels, digest="x", form="pixels")
    # Keys too: what was kept by one may be found by the other.
    assert fast.process_blocking([image]) == own.process_blocking([image])
    assert fast.process_blocking([image] * 2) == own.process_blocking([image] * 2)
    pixels.setflags(write=False)
    assert fast.process_blocking([image]) == own.process_blocking([image])


def test_a_quick_processor_that_differs_is_not_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = quick.resize_rgb
    monkeypatch.setattr(quick, "_knows_pillow", lambda: True)
    for wrong in (lambda *a, **k: right(*a, **k) ^ 1, lambda *a, **k: None):
        monkeypatch.setattr(quick, "resize_rgb", wrong)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "plait.vision"):
            assert not load("qwen2_vl", root)._is_quick
        assert "processed by transformers' own code" in caplog.text


def test_what_is_not_known_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = transformers.CLIPImageProcessorPil
    assert quickened(clip(do_normalize=False)) is None
    assert quickened(clip(do_rescale=False)) is None

    class Own(clip):  # type: ignore[misc, valid-type]
        def normalize(self, image: Any, mean: Any, std: Any, **options: Any) -> Any:
            return image

    assert quickened(Own()) is None
    nearest = clip(resample=0, size={"shortest_edge": 20}, crop_size={"height": 20, "width": 20})
    fast = quickened(nearest)
    assert fast is not None
    pixels = np.random.default_rng(0).integers(0, 256, (31, 50, 3), dtype=np.uint8)
    wanted, found = made_by(nearest, Image.fromarray(pixels)), made_by(fast, pixels)
    assert isinstance(wanted, dict)
    assert isinstance(found, dict)
    assert np.array_equal(found["pixel_values"], wanted["pixel_values"])
    monkeypatch.setattr(quick, "weighs_directions", lambda: None)
    assert quickened(clip()) is None
