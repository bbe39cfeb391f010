"""From a model's decoder to a layer program, with what stands around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.platform.config import KVGroup
from plait.platform.model.build import Skeleton
from plait.platform.model.native.decoder import DecoderTracer
from plait.platform.model.native.instructions import Program
from plait.platform.model.native.registers import assign_registers
from plait.platform.model.native.replay import Replay
from plait.platform.model.native.ropes import GrowingTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """A program, and what its rows and tables need before a step runs."""

    program: Program
    prologue: Replay | None  # of positions: what is added to the embedded rows
    tables: tuple[GrowingTable, ...]
    called: Mapping[str, str]  # modules of the decoder that torch runs, and why

    def begin(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rows `[T, D]` as the program takes them, for positions `[T]` or `[3, T]`."""
        if self.tables:
            needed = 1 + int(positions.max())
            for table in self.tables:
                table.fill(needed)
        if self.prologue is None:
            return rows
        placed = positions[:, None] if positions.dim() == 2 else positions[None]
        return (rows[None] + self.prologue(positions=placed))[0]


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
