"""Rotations by position, found out by trial.

What a family does between a projection and attention is a function of heads and positions. Run over
unit vectors it shows which values turn together, and by what table; run over random heads it must
then give what `RopeOp` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.platform.errors import InternalError
from plait.platform.model.native.instructions import RopeTable

_TRIAL = (0, 1, 2, 11, 57, 300)  # positions; those beyond the context are left out
_FIRST = 1024  # positions of a table that are filled at once

# Heads [1, H, P, D], positions [1, P] or [3, 1, P]; the answer is of the heads' dtype.
Turn = Callable[[Tensor, Tensor], Tensor]


class NoRotation(Exception):
    """The function is no rotation that we have; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """What `RopeOp` needs to know."""

    table: RopeTable
    is_interleaved: bool
    round_products: bool


class GrowingTable:
    """Tables of one rotation, of which only what was asked for so far is filled, and in memory."""

    def __init__(
        self, turn: Turn, *, rotary: int, size: int, is_interleaved: bool, num_axes: int,
        limit: int,
    ) -> None:  # fmt: skip
        """`size`: of a head; `limit`: positions that there will ever be."""
        self.turn = turn
        self.size = size
        self.rotary = rotary
        self.is_interleaved = is_interleaved
        self.num_axes = num_axes
        self.limit = limit
        first, second = pairs(rotary, is_interleaved=is_interleaved)
        self._first, self._second = first, second
        self.cos = torch.empty((limit, rotary))
        self.sin = torch.empty((limit, rotary))
        self.num_filled = 0

    @torch.no_grad()
    def fill(self, num_positions: int) -> None:
        """Have at least the first `num_positions`."""
        if num_positions <= self.num_filled:
            return
        if num_positions > self.limit:
            raise InternalError(f"position {num_positions - 1} is beyond {self.limit} positions")
        end = min(self.limit, max(num_positions, 2 * self.num_filled, _FIRST))
        start, self.num_filled = self.num_filled, end
        count = end - start
        x = torch.zeros((1, 2, count, self.size))  # in fp32: tables as exact as the family's
        x[:, 0, :, self._first] = 1
        x[:, 1, :, self._second] = 1
        positions = torch.arange(start, end)[None]
        if self.num_axes > 1:
            positions = positions.expand(self.num_axes, 1, -1)
        y = self.turn(x, positions)[0]
        cos, sin = self.cos[start:end], self.sin[start:end]
        cos[:, self._first], cos[:, self._second] = y[0][:, self._first], y[1][:, self._second]
        sin[:, self._first], sin[:, self._second] = -y[1][:, self._first], y[0][:, self._second]


def pairs(rotary: int, *, is_interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second value of each pair that turns together."""
    if is_interleaved:
        return torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)
    return torch.arange(rotary // 2), torch.arange(rotary // 2, rotary)


def rotate(
    x_HPD: Tensor, cos: Tensor, sin: Tensor, *, is_interleaved: bool, round_products: bool
) -> Tensor:
    """`RopeOp` by torch, with the tables' rows `[P, rotary]` of the positions."""
    rotary, dtype = cos.shape[-1], x_HPD.dtype
    first, second = pairs(rotary, is_interleaved=is_interleaved)
    turned = x_HPD[..., :rotary].float()
    partner = torch.empty_like(turned)
    partner[..., first], partner[..., second] = -turned[..., second], turned[..., first]
    one, other = turned * cos, partner * sin
    if round_products:
        one, other = one.to(dtype).float(), other.to(dtype).float()
    return torch.cat([(one + other).to(dtype), x_HPD[..., rotary:]], dim=-1)


@torch.no_grad()
def find_rotation(
    turn: Turn, *, size: int, num_axes: int, limit: int, dtype: torch.dtype
) -> tuple[Rotation, GrowingTable]:
    """Find out what `turn` does to heads of `size`.

    Raises `NoRotation`.
    """
    trial = torch.tensor([p for p in _TRIAL if p < limit])
    rotary, is_interleaved = _structure(turn, size, num_axes, trial)
    table = GrowingTable(
        turn, rotary=rotary, size=size, is_interleaved=is_interleaved, num_axes=num_axes,
        limit=limit,
    )  # fmt: skip
    table.fill(int(trial[-1]) + 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 3, len(trial), size), generator=generator).to(dtype)
    wanted = turn(x, _on_all(trial, num_axes)).float()
    off: dict[bool, float] = {}
    for round_products in (True, False):
        ours = rotate(
            x, table.cos[trial], table.sin[trial],
            is_interleaved=is_interleaved, round_products=round_products,
        )  # fmt: skip
        off[round_products] = float((ours.float() - wanted).abs().max())
    round_products = off[True] <= off[False]
    if off[round_products] > (1e-5 if dtype is torch.float32 else 0.04):
        raise NoRotation(f"differs from a rotation by up to {off[round_products]:.2g}")
    axes = None if num_axes == 1 else _axes(turn, rotary, size, is_interleaved)
    rotation = Rotation(
        table=RopeTable(cos=table.cos, sin=table.sin, axes=axes),
        is_interleaved=is_interleaved,
        round_products=round_products,
    )
    return rotation, table


def _on_all(positions: Tensor, num_axes: int) -> Tensor:
    return positions[None] if num_axes == 1 else positions.expand(num_axes, 1, -1)


def _structure(turn: Turn, size: int, num_axes: int, trial: Tensor) -> tuple[int, bool]:
    """How many values turn, and whether neighbours do."""
    x = torch.eye(size)[None, :, None].expand(1, size, len(trial), size)
    y = turn(x.contiguous(), _on_all(trial, num_axes))[0]
    if y.shape != (size, len(trial), size):
        raise NoRotation(f"heads of {size} become {list(y.shape)}")
    meets = (y != 0).any(dim=1)
    meets.fill_diagonal_(False)
    if not meets.any():
        raise NoRotation("nothing turns by position")
    if (meets.sum(dim=1) > 1).any():
        raise NoRotation("more than two values meet")
    columns = meets.any(dim=1).nonzero().flatten()
    partner = meets[columns].float().argmax(dim=1)
    distance = int((partner - columns).abs().max())
    is_interleaved = distance == 1
    rotary = int(columns.max()) + 1 if is_interleaved else 2 * distance
    first, second = pairs(rotary, is_interleaved=is_interleaved)
    wanted = torch.zeros_like(meets)
    wanted[first, second] = wanted[second, first] = True
    if rotary > size or (meets & ~wanted).any():
        raise NoRotation("the values that turn together are neither neighbours nor halves")
    return rotary, is_interleaved


def _axes(turn: Turn, rotary: int, size: int, is_interleaved: bool) -> Tensor:
    """By which of the three positions each value turns."""
    first, second = pairs(rotary, is_interleaved=is_interleaved)
    x = torch.zeros((1, 1, 1, size))
    x[..., first] = 1
    axes = torch.full((rotary,), -1, dtype=torch.int32)
    for axis in range(3):
        position = torch.zeros((3, 1, 1), dtype=torch.int64)
        position[axis] = 1
        y = turn(x, position)[0, 0, 0]
        turns = y[second] != 0
        if (axes[second][turns] >= 0).any():
            raise NoRotation("values turn by several positions at once")
        axes[first[turns]] = axes[second[turns]] = axis
    return axes.clamp(min=0)  # what never turns
