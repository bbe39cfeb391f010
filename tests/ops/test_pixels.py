"""Pillow and numpy are the oracles of what makes tensors of images, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from support import cpu_isa

from plait.platform.ops.pixels import pixel_patches, pixel_planes, resize_rgb
from plait.vision.quick import _goes_down_first

LANCZOS, BILINEAR, BICUBIC = FILTERS = (1, 2, 3)


@pytest.fixture(autouse=True, params=[n for n in cpu_isa.available() if n in ("generic", "avx2")])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


def resized(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    down_first = _goes_down_first(pixels.shape[:2], (height, width))
    made = resize_rgb(torch.from_numpy(pixels), (height, width), resample, down_first=down_first)
    return made.numpy()


def by_pillow(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    image = Image.fromarray(pixels).resize((width, height), Image.Resampling(resample))
    return np.asarray(image)


@pytest.mark.parametrize("resample", FILTERS)
@pytest.mark.parametrize("seed", range(8))
def test_a_resized_image_is_pillows(seed, resample):
    """Sides of every kind: kept, a little or much longer or shorter, of one pixel."""
    rng = np.random.default_rng(seed)
    for number in range(40):
        top = (12, 60, 200)[number % 3]
        old_height, old_width, height, width = (int(n) for n in rng.integers(1, top, 4))
        height = old_height if number % 7 == 0 else height
        width = old_width if number % 5 == 0 else width
        pixels = rng.integers(0, 256, (old_height, old_width, 3), dtype=np.uint8)
        if number % 2:  # edges: what overshoots is cut off
            pixels = (pixels & 128) * 255 // 128
            pixels = pixels.astype(np.uint8)
        found = resized(pixels, height, width, resample)
        wanted = by_pillow(pixels, height, width, resample)
        assert np.array_equal(found, wanted), (old_height, old_width, height, width)


@pytest.mark.parametrize(
    ("old", "new"),
    [((3, 2000), (2, 64)), ((2000, 3), (64, 2)), ((1, 1), (90, 70)), ((701, 503), (7, 5))],
)
def test_extreme_shapes_are_pillows(old, new):
    pixels = np.random.default_rng(0).integers(0, 256, (*old, 3), dtype=np.uint8)
    for resample in FILTERS:
        assert np.array_equal(resized(pixels, *new, resample), by_pillow(pixels, *new, resample))


def test_a_part_of_an_image_is_resized_as_its_copy():
    whole = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    part = whole[11:61, 7:47]
    for new in ((50, 40), (50, 90), (20, 40), (33, 41)):
        assert np.array_equal(resized(part, *new, BICUBIC), resized(part.copy(), *new, BICUBIC))


def test_planes_and_patches_are_looked_up_value_by_value():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (24, 36, 3), dtype=np.uint8)
    table = torch.randn(3, 256)
    wanted = np.stack([table[c].numpy()[pixels[:, :, c]] for c in range(3)])
    planar = np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
    for given in (pixels, np.moveaxis(planar, 0, -1)):
        assert np.array_equal(pixel_planes(torch.from_numpy(given), table).numpy(), wanted)
        for size, merge, times in ((6, 2, 2), (4, 3, 1), (12, 1, 3)):
            made = pixel_patches(
                torch.from_numpy(given), table, size=size, merge=merge, times=times
            )
            grid = wanted.reshape(
                3, 24 // size // merge, merge, size, 36 // size // merge, merge, size
            )
            cut = grid.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
            rows = np.repeat(cut, times, axis=5).reshape(-1, 3 * times * size**2)
            assert np.array_equal(made.numpy(), rows)


def test_arguments_that_do_not_fit_are_refused_by_name():
    pixels, table = torch.zeros(4, 6, 3, dtype=torch.uint8), torch.zeros(3, 256)
    ops = torch.ops.plait
    out = torch.zeros(2, 2, 3, dtype=torch.uint8)
    for given, to, resample, match in (
        (pixels.float(), out, 3, "resize_rgb_: pixels must be uint8"),
        (pixels[:0], out, 3, "not empty"),
        (pixels[:, :, :2], out, 3, "H, W, 3"),
        (pixels[:, ::2], out, 3, "dense"),
        (pixels.transpose(0, 1), out, 3, "dense"),
        (pixels, torch.zeros(2, 4, 3, dtype=torch.uint8)[:, ::2], 3, "out must be dense"),
        (pixels, out, 0, "filter must be"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.resize_rgb_(given, to, resample, False)
    with pytest.raises(RuntimeError, match=r"pixel_planes_: out must be \[3, H, W\]"):
        ops.pixel_planes_(pixels, table, torch.zeros(3, 6, 4))
    with pytest.raises(RuntimeError, match="table must"):
        ops.pixel_planes_(pixels, table[:, :255], torch.zeros(3, 4, 6))
    with pytest.raises(RuntimeError, match="multiples of 4"):
        ops.pixel_patches_(pixels, table, torch.zeros(6, 12), 2, 2, 1)
    with pytest.raises(RuntimeError, match="out must be"):
        ops.pixel_patches_(pixels, table, torch.zeros(6, 12), 2, 1, 2)
    with pytest.raises(RuntimeError, match="must lie in"):
        ops.pixel_patches_(pixels, table, torch.zeros(6, 12), 0, 1, 1)
