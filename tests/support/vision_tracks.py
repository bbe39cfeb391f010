"""Prompts with images as tracks of `VisionDriver`."""

from __future__ import annotations

from typing import Any

from support.tiny_vision import FAMILIES
from support.vision_driver import ImageTrack
from support.vision_prompts import Prompt, grid_positions

from plait.platform.config import Options
from plait.platform.model import load_model
from plait.platform.model.executor import TorchExecutor


def load(directory: Any, dtype: str = "float32") -> TorchExecutor:
    return load_model(Options(model=str(directory), dtype=dtype)).executor


def layouts(family: str) -> list[tuple[Any, ...]]:
    """Images in the middle, first and last, several of odd sizes, and none at all."""
    sizes = FAMILIES[family].sizes
    if family == "paligemma":  # its prompts begin with their one image
        return [(sizes[0], 9), (sizes[0], 21), (sizes[0], 1)]
    several = [part for size in sizes[1:] for part in (size, 2)]
    return [(11, sizes[-1], 5), (sizes[0], 3, *several, sizes[0]), (30,)]


def track_of(
    model: Any, prompt: Prompt, *, start_step: int = 0, num_output: int = 12, **more: Any
) -> ImageTrack:
    """`model` is transformers' own."""
    positions, delta = grid_positions(model, prompt)
    return ImageTrack(
        tokens=list(prompt.tokens),
        num_output=num_output,
        start_step=start_step,
        items=prompt.items,
        positions=positions,
        position_delta=delta,
        spans=prompt.spans,
        **more,
    )
