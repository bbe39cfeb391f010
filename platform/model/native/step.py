"""What a layer program is given in a step, beside the embedded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.platform.model.attention import GroupStep
from plait.platform.ops.lora import LoraSegments


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """A step's T rows: where they stand, where their K and V lie, and what changes them."""

    positions: Tensor  # int64 [T], or [3, T] where the model's positions are of a grid
    query_start: Tensor  # int32 [S+1]
    seq_lens: Tensor  # int32 [S]
    groups: Sequence[GroupStep]  # by KV group
    ranges: Tensor | None = None  # int32 [N, 3], where tokens see each other both ways
    lora: LoraSegments | None = None
    # [I, levels * D] in the model's dtype: `AddEmbedsOp.level` adds columns level * D and on.
    embeds: Tensor | None = None
    image_rows: Tensor | None = None  # int64 [I], ascending
