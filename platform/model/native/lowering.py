"""From a model's decoder to a layer program, with what stands around it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait.platform.config import KVGroup
from plait.platform.model.build import Skeleton
from plait.platform.model.native.decoder import DecoderTracer
from plait.platform.model.native.lowered import Lowered
from plait.platform.model.native.registers import assign_registers


@torch.no_grad()
def lower(skeleton: Skeleton, kv_groups: Sequence[KVGroup], *, num_positions: int) -> Lowered:
    """Lower the decoder of `skeleton`, whose buffers are filled.

    `num_positions`: that requests may reach. Without weights the program shows what would run.

    Raises `NotLowered` with the module that has no instruction, and why.
    """
    traced = DecoderTracer(skeleton, kv_groups, num_positions=num_positions).run()
    return Lowered(
        program=assign_registers(traced.trace),
        prologue=traced.trace.prologue,
        tables=tuple(traced.tables),
        called=traced.called,
    )
