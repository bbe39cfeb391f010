"""What lowering gives, and what a native executor runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from plait.platform.model.native.instructions import Program
from plait.platform.model.native.replay import Replay
from plait.platform.model.native.ropes import GrowingTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """A program, and what its rows and tables need before a step runs."""

    program: Program
    prologue: Replay | None  # of positions: what is added to the embedded rows
    tables: tuple[GrowingTable, ...]
    called: Mapping[str, str]  # modules of the decoder that torch runs, and why

    def reach(self, num_positions: int) -> None:
        """Have the tables' rows of so many positions."""
        for table in self.tables:
            table.fill(num_positions)

    def begin(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rows `[T, D]` as the program takes them, for positions `[T]` or `[3, T]`."""
        if self.prologue is None:
            return rows
        placed = positions[:, None] if positions.dim() == 2 else positions[None]
        return (rows[None] + self.prologue(positions=placed))[0]
