"""What executors run: the pieces of a model, however they were had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from plait.platform.model.families import VisionFamily
from plait.platform.model.leaves import Leaves
from plait.platform.model.places import Places

if TYPE_CHECKING:
    from plait.platform.model.probe import LayerAttention
    from plait.platform.model.tower import TowerStep
    from plait.platform.model.vision import VisionParts

Head = Callable[[Tensor], Tensor]  # hidden rows [R, D] to logits [R, V] in fp32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Of one model, with its weights."""

    leaves: Leaves
    backbone: Any  # has `get_input_embeddings`; the torch executor runs it whole
    head: Head
    output: Any  # the head's leaf
    dtype: torch.dtype
    hidden_size: int
    layers: tuple[LayerAttention, ...]  # of the backbone, where it can run
    places: Places
    family: VisionFamily | None  # where the model takes images
    # Gives tower and projector, whose leaves ask this step; called before the first image.
    open_vision: Callable[[TowerStep], VisionParts] | None
    is_vision_stored: bool = False  # opening it takes no time, and nothing of transformers
