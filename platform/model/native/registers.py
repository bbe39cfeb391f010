"""From values, each made once, to registers, which are written again once nobody reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from plait.platform.model.native.instructions import (
    AddEmbedsOp,
    AddOp,
    Columns,
    CopyOp,
    Instruction,
    Program,
    ScaleOp,
)
from plait.platform.model.native.trace import ProductOp, SumOp, Trace, TracedOp


def assign_registers(trace: Trace) -> Program:
    """The trace as a program. Register 0 begins with value 0, the embedded rows."""
    return _Assignment(trace).run()


class _Assignment:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._last = _last_uses(trace)
        self._register: dict[int, int] = {0: 0}  # of values that are alive
        self._widths: list[int] = [trace.widths[0]]
        self._free: list[int] = []
        self._code: list[Instruction] = []

    def run(self) -> Program:
        for index, op in enumerate(self._trace.code):
            self._place(index, op)
            for value in sorted({*_values(op), *_made(op)}):
                if self._last[value] <= index and value in self._register:
                    self._free.append(self._register.pop(value))
        return Program(
            widths=tuple(self._widths),
            code=tuple(self._code),
            output=self._register[self._trace.output],
        )

    def _place(self, index: int, op: TracedOp) -> None:
        if isinstance(op, SumOp):
            a, b = op.a, op.b
            if op.scale == 1.0 and self._last[a] > index and self._last[b] <= index:
                a, b = b, a
            added = self._register[b]
            output = self._continue(index, a, op.output, keep=a == b)
            self._code.append(AddOp(output=output, input=added, scale=op.scale))
        elif isinstance(op, ProductOp):
            output = self._continue(index, op.a, op.output, keep=False)
            self._code.append(ScaleOp(output=output, scale=op.scale))
        else:
            for value in _made(op):
                self._register[value] = self._take(self._trace.widths[value])
            self._code.append(self._in_registers(op))

    def _continue(self, index: int, value: int, output: int, *, keep: bool) -> int:
        """A register that holds `value`, to be changed into `output`."""
        if self._last[value] <= index and not keep:
            self._register[output] = self._register.pop(value)
        else:
            self._register[output] = self._take(self._trace.widths[value])
            copied = self._register[value]
            self._code.append(CopyOp(output=self._register[output], input=copied))
        return self._register[output]

    def _take(self, width: int) -> int:
        for register in sorted(self._free):  # the lowest: so that layers come out alike
            if self._widths[register] == width:
                self._free.remove(register)
                return register
        self._widths.append(width)
        return len(self._widths) - 1

    def _in_registers(self, op: Any) -> Instruction:
        changes: dict[str, Any] = {}
        for name, value in _operands(op):
            if isinstance(value, Columns):
                register = self._register[value.register]
                changes[name] = replace(value, register=register)
            else:
                changes[name] = self._register[value]
        placed: Instruction = replace(op, **changes)
        return placed


def _operands(op: Any) -> Iterator[tuple[str, Any]]:
    """Fields of an instruction that name values."""
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, Columns) or field.name in ("output", "input", "a", "b"):
            yield field.name, value


def _values(op: TracedOp) -> Sequence[int]:
    """All values that an instruction names."""
    return [v.register if isinstance(v, Columns) else v for _, v in _operands(op)]


def _made(op: TracedOp) -> Sequence[int]:
    """The value that it makes, if any: images are added to one that is there."""
    output = getattr(op, "output", None)
    return [] if output is None or isinstance(op, AddEmbedsOp) else [output]


def _last_uses(trace: Trace) -> list[int]:
    """Index of the last instruction that names each value; -1: none does."""
    last = [-1] * len(trace.widths)
    for index, op in enumerate(trace.code):
        for value in _values(op):
            last[value] = index
    last[trace.output] = len(trace.code)
    return last
