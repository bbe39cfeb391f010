"""Layer programs as plain data, so that a later start needs nothing to trace.

Weights and other tensors are named, and found again by whoever knows the names; the few that have
none are written out. Tables of rotations are stored by their frequencies, where these give the same
tables bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn

from plait.platform.model.native.instructions import (
    Columns,
    Instruction,
    Program,
    RopeTable,
)
from plait.platform.model.native.ropes import GrowingTable, Turn, pairs, rotate
from plait.platform.ops.linear import PackedWeight
from plait.platform.ops.quantized_weight import PackedQuantized

_MAX_VALUES = 4096  # of a tensor that is written out
_ROUNDED = ("float32", "bfloat16")  # what families round cosines and sines to
_COMPARED = 2048  # first positions, and later ones, of tables that are compared
_KINDS = {kind.__name__: kind for kind in get_args(Instruction)}


class NotStorable(Exception):
    """Something has no plain form; the message says what."""


class Names(Protocol):
    """Knows what a model keeps by name."""

    def of(self, value: Any) -> str | None:
        """The name of a tensor or packed weight; None where it has none."""

    def find(self, name: str) -> Any:
        """What is kept under a name."""


# --- programs ---


def describe_program(program: Program, tables: Sequence[GrowingTable], names: Names) -> Any:
    """The program as what JSON has. Raises `NotStorable`."""
    places = {id(table.cos): place for place, table in enumerate(tables)}
    return {
        "widths": list(program.widths),
        "output": program.output,
        "code": [
            [type(op).__name__, [_describe(getattr(op, f.name), places, names) for f in fields(op)]]
            for op in program.code
        ],
    }


def restore_program(stored: Any, tables: Sequence[GrowingTable], names: Names) -> Program:
    """What `describe_program` described."""
    ropes = [RopeTable(cos=table.cos, sin=table.sin) for table in tables]
    code: list[Any] = []
    for kind_name, values in stored["code"]:
        kind: Any = _KINDS[kind_name]
        given = zip(fields(kind), values, strict=True)
        code.append(kind(**{f.name: _restore(value, ropes, names) for f, value in given}))
    return Program(widths=tuple(stored["widths"]), code=tuple(code), output=stored["output"])


def _describe(value: Any, places: dict[int, int], names: Names) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Columns):
        return {"columns": [getattr(value, f.name) for f in fields(value)]}
    if isinstance(value, RopeTable):
        if value.axes is not None or id(value.cos) not in places:
            raise NotStorable("a rotation by several positions")
        return {"rope": places[id(value.cos)]}
    if isinstance(value, Tensor | PackedWeight | PackedQuantized):
        name = names.of(value)
        if name is not None:
            return {"kept": name}
        if isinstance(value, Tensor):
            return {"tensor": describe_tensor(value)}
    raise NotStorable(f"a {type(value).__name__}")


def _restore(value: Any, ropes: Sequence[RopeTable], names: Names) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "columns":
        return Columns(**{f.name: x for f, x in zip(fields(Columns), content, strict=True)})
    if kind == "rope":
        return ropes[content]
    return names.find(content) if kind == "kept" else restore_tensor(content)


def describe_tensor(tensor: Tensor) -> Any:
    """A small tensor with its values. Raises `NotStorable`."""
    if tensor.numel() > _MAX_VALUES:
        raise NotStorable(f"a tensor {list(tensor.shape)} that the model does not keep by name")
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), tensor.detach().flatten().tolist()]


def restore_tensor(stored: Any) -> Tensor:
    """What `describe_tensor` described."""
    dtype, shape, values = stored
    return torch.tensor(values, dtype=getattr(torch, dtype)).view(shape)


# --- rotations ---


def describe_table(table: GrowingTable, modules: Iterable[nn.Module]) -> Any:
    """The table by those frequencies of `modules` that give it. Raises `NotStorable`."""
    if table.num_axes == 1:
        found = _frequencies(modules, table.rotary // 2)
        for (frequencies, scale), dtype in itertools.product(found, _ROUNDED):
            stored = {
                "frequencies": describe_tensor(frequencies),
                "scale": scale,
                "dtype": dtype,
                "rotary": table.rotary,
                "size": table.size,
                "is_interleaved": table.is_interleaved,
                "limit": table.limit,
            }
            if _is_same(_turn_by(stored), table):
                return stored
    raise NotStorable("a rotation that no frequencies give")


def restore_table(stored: Any) -> GrowingTable:
    """What `describe_table` described."""
    return GrowingTable(
        _turn_by(stored),
        rotary=stored["rotary"],
        size=stored["size"],
        is_interleaved=stored["is_interleaved"],
        num_axes=1,
        limit=stored["limit"],
    )


def _frequencies(modules: Iterable[nn.Module], count: int) -> Iterable[tuple[Tensor, float]]:
    """Frequencies under the names that transformers gives them, with their scales."""
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and buffer.shape == (count,):
                scale = getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0)
                yield buffer.float(), float(scale)


def _turn_by(stored: Any) -> Turn:
    """How heads are turned, in fp32: `GrowingTable` asks for nothing else."""
    frequencies, scale = restore_tensor(stored["frequencies"]), stored["scale"]
    dtype: torch.dtype = getattr(torch, stored["dtype"])
    is_interleaved: bool = stored["is_interleaved"]
    first, second = pairs(2 * len(frequencies), is_interleaved=is_interleaved)
    spread = torch.empty(2 * len(frequencies))
    spread[first] = spread[second] = frequencies

    def turn(heads: Tensor, positions: Tensor) -> Tensor:
        angles = positions[0].float()[:, None] * spread
        cos, sin = ((f() * scale).to(dtype).float() for f in (angles.cos, angles.sin))
        return rotate(heads, cos, sin, is_interleaved=is_interleaved, round_products=False)

    return turn


@torch.no_grad()
def _is_same(turn: Turn, table: GrowingTable) -> bool:
    """Whether both turn alike, at the first positions and at many behind them."""
    later = torch.randint(table.limit, (_COMPARED,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(min(table.limit, _COMPARED)), later])[None]
    heads = torch.zeros((1, 2, positions.shape[1], table.size))
    first, second = pairs(table.rotary, is_interleaved=table.is_interleaved)
    heads[:, 0, :, first] = 1
    heads[:, 1, :, second] = 1
    return torch.equal(turn(heads, positions), table.turn(heads, positions))
