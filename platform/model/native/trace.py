"""What a decoder computes, seen by running its own forward once over three rows of zeros.

The family's forward runs as it is. Our leaves, its norms, its activations and its attention answer
with zeros and write down that they were called, as instructions over *values*: rows that are made
once, numbered in the order in which they are made. Every torch function in between is written down
too, and is read only when something takes its answer: rows that were added or scaled become an
instruction, heads that were turned by positions a rotation (`ropes.py`). What is not understood
raises `NotLowered`, which says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.platform.model.native.instructions import Columns, Instruction
from plait.platform.model.native.replay import Recorded, Replay, tensors_of

NUM_ROWS = 3


class NotLowered(Exception):
    """Something in the decoder has no instruction; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SumOp:
    """`output = a + scale · b`; becomes an `AddOp` once it is known which of them goes on."""

    output: int
    a: int
    b: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProductOp:
    """`output = scale · a`; becomes a `ScaleOp`."""

    output: int
    a: int
    scale: float


TracedOp = Instruction | SumOp | ProductOp


@dataclass(slots=True, eq=False)
class _Area:
    """A tensor whose rows are columns `start : start + width` of a value."""

    value: int
    start: int
    width: int
    version: int  # of these columns: how often they were changed in place


@dataclass(slots=True, eq=False)
class Trace:
    """Instructions over values, in order, and what stands before them."""

    widths: list[int] = field(default_factory=list)
    code: list[TracedOp] = field(default_factory=list)
    output: int = 0
    prologue: Replay | None = None  # of positions: what is added to the embedded rows


class Tracer(TorchFunctionMode):
    """Writes down one forward. What leaves do is told by `make`, what they take by `rows`."""

    def __init__(self, positions: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.trace = Trace()
        self.dtype = dtype
        self.positions = positions
        self._recorded: dict[int, Recorded] = {}
        self._areas: dict[int, _Area] = {}
        self._versions: list[np.ndarray] = []  # of each value's columns
        self._kept: list[Tensor] = [positions]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function, and write down what it was where it took what we follow."""
        del types
        kwargs = kwargs or {}
        if func.__name__ in _ASKING:
            return func(*args, **kwargs)
        followed = [t for t in tensors_of(args, kwargs) if self._is_followed(t)]
        before = [t._version for t in followed]
        result = func(*args, **kwargs)
        if followed:
            if before != [t._version for t in followed]:
                raise NotLowered(f"{_name(func)} writes into rows")
            self.record(func, args, kwargs, result)
        return result

    def record(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Write down that `func` gave `result`."""
        taken = {id(t) for t in tensors_of(args, kwargs)}
        if isinstance(result, Tensor):
            if id(result) not in taken:
                self._remember(result, Recorded(func, args, kwargs, None))
        elif isinstance(result, tuple | list):
            for index, part in enumerate(result):
                if isinstance(part, Tensor) and id(part) not in taken:
                    self._remember(part, Recorded(func, args, kwargs, index))

    def _remember(self, tensor: Tensor, node: Recorded) -> None:
        self._kept.append(tensor)
        self._recorded[id(tensor)] = node

    def _is_followed(self, tensor: Tensor) -> bool:
        return (
            tensor is self.positions
            or id(tensor) in self._recorded
            or _storage(tensor) in self._areas
        )

    # Making values

    def value(self, width: int) -> int:
        """A new value's number."""
        self.trace.widths.append(width)
        self._versions.append(np.zeros(width, np.int32))
        return len(self.trace.widths) - 1

    def emit(self, op: TracedOp) -> None:
        """Append an instruction."""
        self.trace.code.append(op)

    def stand_in(self, value: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor of zeros that stands for a whole value."""
        tensor = torch.zeros(shape, dtype=self.dtype)
        self._cover(tensor, _Area(value, 0, self.trace.widths[value], 0))
        return tensor

    def _cover(self, tensor: Tensor, area: _Area) -> None:
        self._kept.append(tensor)
        self._areas[_storage(tensor)] = area

    def changed(self, columns: Columns) -> Tensor:
        """Columns were changed in place; the tensor `[1, T, H, D]` that holds them from now on."""
        tensor = torch.zeros((1, NUM_ROWS, columns.num_heads, columns.head_size), dtype=self.dtype)
        at = _indices(columns)
        version = 1 + self._version(columns.register, at)
        self._versions[columns.register][at] = version
        if columns.head_stride == columns.head_size:  # else nothing more is done with them
            self._cover(tensor, _Area(columns.register, columns.start, columns.width, version))
        return tensor

    def _version(self, value: int, at: np.ndarray | slice) -> int:
        return int(self._versions[value][at].max(initial=0))

    def _check_fresh(self, area: _Area, at: np.ndarray | slice) -> None:
        if self._version(area.value, at) != area.version:
            raise NotLowered("takes rows as they were before they were changed in place")

    # Reading values

    def rows(self, tensor: Tensor) -> int:
        """The value that `tensor` holds whole; makes it where it was only written down."""
        area = self._areas.get(_storage(tensor))
        if area is not None:
            width = self.trace.widths[area.value]
            is_whole = area.width == width and tensor.numel() == NUM_ROWS * width
            if not is_whole or not tensor.is_contiguous() or tensor.shape[-1] != width:
                raise NotLowered(f"takes {list(tensor.shape)} of rows that are {width} wide")
            self._check_fresh(area, slice(None))
            return area.value
        node = self._recorded.get(id(tensor))
        if node is None:
            raise NotLowered("takes rows that come from elsewhere")
        value = self._made(tensor, node)
        self._cover(tensor, _Area(value, 0, self.trace.widths[value], 0))
        return value

    def _made(self, tensor: Tensor, node: Recorded) -> int:
        first = node.args[0] if node.args else None
        if isinstance(first, Tensor) and (
            _storage(first) == _storage(tensor) or node.function is torch.Tensor.clone
        ):
            value = self.rows(first)
            if tensor.numel() != NUM_ROWS * self.trace.widths[value]:
                raise NotLowered(f"{node.name} takes a part of rows")
            return value
        if node.name in _ADDS and len(node.args) == 2 and not node.kwargs:
            return self._sum(*node.args)
        factor = self._factor_of(node)
        if factor is not None:
            value = self.rows(factor[0])
            output = self.value(self.trace.widths[value])
            self.emit(ProductOp(output=output, a=value, scale=factor[1]))
            return output
        raise NotLowered(f"takes the answer of {node.name}")

    def _sum(self, one: Any, other: Any) -> int:
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            raise NotLowered("adds a number to rows")
        for a, b in ((one, other), (other, one)):
            if self._is_of_positions(b):
                return self._begin_with(a, b)
        scale = 1.0
        for a, b in ((one, other), (other, one)):
            factor = self._unmade_factor(b)
            if factor is not None:
                (other, scale), one = factor, a
                break
        value, added = self.rows(one), self.rows(other)
        if self.trace.widths[value] != self.trace.widths[added]:
            raise NotLowered("adds rows of different widths")
        output = self.value(self.trace.widths[value])
        self.emit(SumOp(output=output, a=value, b=added, scale=scale))
        return output

    def _unmade_factor(self, tensor: Tensor) -> tuple[Tensor, float] | None:
        node = self._recorded.get(id(tensor))
        if node is None or _storage(tensor) in self._areas:
            return None
        return self._factor_of(node)

    def _factor_of(self, node: Recorded) -> tuple[Tensor, float] | None:
        """Rows and number, where `node` multiplies the one by the other."""
        if node.name not in _PRODUCTS or len(node.args) != 2 or node.kwargs:
            return None
        for a, b in (node.args, node.args[::-1]):
            if isinstance(a, Tensor) and (
                isinstance(b, int | float) or self._is_number(b, a.dtype)
            ):
                return a, float(b)
        return None

    def _is_number(self, value: Any, dtype: torch.dtype) -> bool:
        """Is it a tensor of one value that does not follow from anything?"""
        if not isinstance(value, Tensor) or value.dim() or value.is_meta:
            return False
        return value.dtype in (dtype, torch.float64) and not self._is_followed(value)

    def _is_of_positions(self, tensor: Tensor) -> bool:
        """Does it follow from positions alone?"""
        if _storage(tensor) in self._areas:
            return False
        if tensor is self.positions:
            return True
        node = self._recorded.get(id(tensor))
        if node is None:
            return False
        parts = [t for t in tensors_of(node.args, node.kwargs) if self._is_followed(t)]
        return bool(parts) and all(self._is_of_positions(t) for t in parts)

    def _begin_with(self, rows: Tensor, added: Tensor) -> int:
        """What is added to the embedded rows by position comes before the program."""
        value = self.rows(rows)
        if value != 0 or self.trace.prologue is not None or any(self.trace.code):
            raise NotLowered("adds something by position between the layers")
        self.trace.prologue = self.replay(added, {id(self.positions): "positions"})
        return 0

    def heads(self, tensor: Tensor) -> Columns | None:
        """The columns that `tensor` `[1, H, T, D]` is a view of, as heads; None: of none."""
        area = self._areas.get(_storage(tensor))
        if area is None:
            return None
        _, num_heads, num_rows, size = tensor.shape
        _, of_head, of_row, of_column = tensor.stride()
        start, offset = area.start, int(tensor.storage_offset())
        fits = num_rows == NUM_ROWS and of_row == area.width and of_column == 1
        if not fits or (num_heads > 1 and of_head < size) or offset >= area.width:
            raise NotLowered(f"heads of shape {list(tensor.shape)} do not lie side by side")
        columns = Columns(
            register=area.value,
            start=start + offset,
            num_heads=num_heads,
            head_size=size,
            stride=int(of_head) if num_heads > 1 and of_head != size else 0,
        )
        self._check_fresh(area, _indices(columns))
        return columns

    def is_rows_first(self, tensor: Tensor) -> bool:
        """Is `tensor` `[1, T, H, D]`, and not `[1, H, T, D]`?"""
        area = self._areas.get(_storage(tensor))
        width = None if area is None else area.width
        return tensor.shape[1] == NUM_ROWS and tensor.stride(1) == width

    # What torch did in between

    def sources(self, tensor: Tensor) -> list[Tensor]:
        """The views of one value's heads, all the same, that `tensor` was computed from."""
        found: list[Tensor] = []
        seen: set[int] = set()

        def visit(t: Tensor) -> None:
            if id(t) in seen or not self._is_followed(t) or t is self.positions:
                return
            seen.add(id(t))
            node = self._recorded.get(id(t))
            if _storage(t) in self._areas and (t.numel() == tensor.numel() or node is None):
                found.append(t)
            elif node is not None:
                for part in tensors_of(node.args, node.kwargs):
                    visit(part)

        visit(tensor)
        places = {(_storage(t), t.storage_offset(), t.shape, t.stride()) for t in found}
        if len(places) != 1 or found[0].numel() != tensor.numel() or found[0].dim() != 4:
            raise NotLowered(f"heads are put together from {len(places)} parts")
        return found

    def replay(self, tensor: Tensor, inputs: dict[int, str]) -> Replay:
        """How `tensor` was computed, as a function of what `inputs` names by id."""
        return Replay(tensor, self._recorded, inputs)


def _indices(columns: Columns) -> np.ndarray:
    heads = columns.start + columns.head_stride * np.arange(columns.num_heads)
    return (heads[:, None] + np.arange(columns.head_size)).ravel()


def _name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if not tensor.is_meta else -id(tensor)


# What tells something about a tensor, and gives none.
_ASKING = frozenset({"size", "dim", "stride", "numel", "is_contiguous", "is_floating_point"})
_ADDS = frozenset({"add", "__add__", "__radd__"})
_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "multiply"})


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose own use of torch is not written down."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return run


@contextmanager
def answering(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within, these modules' calls are answered by these functions."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            before = module.__dict__.get("forward")
            module.__dict__["forward"] = unseen(forward)

            def restore(module: nn.Module = module, before: Any = before) -> None:
                if before is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = before

            stack.callback(restore)
        yield
