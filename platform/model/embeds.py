"""What the language model of a vision-language family takes in a step that has images.

Rows of images take their embeddings from the encoder, as the family's own forward puts them there:
in the place of the embedding's output, unscaled. Everything else of a step is as without images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.platform.batch import StepBatch
from plait.platform.config import VisionInfo
from plait.platform.errors import InternalError
from plait.platform.model.families import VisionFamily


def grid_positions(batch: StepBatch, family: VisionFamily | None) -> Tensor:
    """`position_ids` as the family's language model takes them: `[1, T]`, or `[3, 1, T]`."""
    positions = row_positions(batch, family)
    return positions[None] if positions.dim() == 1 else positions[:, None]


def row_positions(batch: StepBatch, family: VisionFamily | None) -> Tensor:
    """Where the model takes each row to be: `[T]`, or `[3, T]`."""
    positions = torch.from_numpy(batch.positions)
    if batch.positions.ndim == 1:
        first = 0 if family is None else family.first_position
        return positions + first if first else positions
    if family is None or not family.has_grid_positions or len(positions) != 3:
        raise InternalError(f"positions of shape {list(positions.shape)} reached the model")
    return positions


def without_image_tokens(batch: StepBatch) -> StepBatch:
    """The batch with token 0 at rows of images: theirs may be in no vocabulary."""
    token_ids = batch.token_ids.copy()
    token_ids[batch.image_rows] = 0
    return replace(batch, token_ids=token_ids)


def put_embeds(
    embedded: Tensor, batch: StepBatch, embeds: Tensor, info: VisionInfo
) -> dict[str, Any]:
    """Put `embeds` `[I, levels * D]` into `embedded` `[1, T, D]`; the language model's arguments.

    Levels after the first become what Qwen3-VL adds after its first layers.
    """
    rows = batch.image_rows
    size = info.hidden_size
    if embeds.shape != (len(rows), info.num_levels * size):
        raise InternalError(
            f"embeds of shape {list(embeds.shape)} for {len(rows)} rows of images, which take "
            f"{info.num_levels} levels of {size}"
        )
    if (np.diff(rows) <= 0).any():
        raise InternalError("rows of images are out of order")
    index = torch.from_numpy(rows)
    embedded[0].index_copy_(0, index, embeds[:, :size].to(embedded.dtype))
    arguments: dict[str, Any] = {"inputs_embeds": embedded}
    if info.num_levels > 1:
        is_image = torch.zeros((1, embedded.shape[1]), dtype=torch.bool)
        is_image[0, index] = True
        arguments["visual_pos_masks"] = is_image
        levels = embeds[:, size:].to(embedded.dtype).split(size, dim=1)
        arguments["deepstack_visual_embeds"] = [level.contiguous() for level in levels]
    return arguments
