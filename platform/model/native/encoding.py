"""Layer programs as integers: what ``csrc/program_decode.cpp`` reads.

Instruction after instruction: its kind, the phase that its time is booked under, the number of its
fields, the fields. Tensors are named by their place in a list, floats written as the bits of a
double.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from plait.platform.model.native.instructions import (
    ActivationOp,
    AddEmbedsOp,
    AddOp,
    AttentionOp,
    CallOp,
    Columns,
    CopyOp,
    GatedActivationOp,
    HeadNormOp,
    Instruction,
    LayerNormOp,
    LinearOp,
    Program,
    RMSNormOp,
    RopeOp,
    ScaleOp,
    TapOp,
)
from plait.platform.ops.activation import Activation
from plait.platform.ops.linear import PackedWeight
from plait.platform.ops.quantized_weight import PackedQuantized

_ACTIVATIONS = get_args(Activation)  # in the order of the enum in csrc/gated_activation.h


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedProgram:
    """A program as the C++ library takes it."""

    code: Tensor  # int64 [n]
    tensors: list[Tensor]
    names: tuple[str, ...]  # of the instructions
    phases: tuple[str, ...]  # of the counters


def encode(program: Program) -> EncodedProgram:
    """Write down every instruction."""
    tensors = _Tensors()
    phases: dict[str, int] = {}
    code: list[int] = []
    names: list[str] = []
    for instruction in program.code:
        kind, fields_of = _kind_of(instruction)
        name = getattr(instruction, "name", "") or _NAMES[type(instruction)]
        names.append(name)
        phase = phases.setdefault(_phase(instruction, name), len(phases))
        fields = fields_of(instruction, tensors)
        code += [kind, phase, len(fields), *fields]
    return EncodedProgram(
        code=torch.tensor(code, dtype=torch.int64),
        tensors=tensors.kept,
        names=tuple(" ".join(name.split()) for name in names),
        phases=tuple(phases),
    )


def _kind_of(instruction: Instruction) -> tuple[int, Callable[[Any, _Tensors], list[int]]]:
    if isinstance(instruction, LinearOp) and isinstance(instruction.weight, PackedQuantized):
        return len(_ENCODERS), _quantized_linear
    return _KINDS[type(instruction)]


def _phase(instruction: Instruction, name: str) -> str:
    """Linears and calls go by the last part of their names: that of every layer is the same."""
    if isinstance(instruction, LinearOp | CallOp):
        return name.rsplit(".", 1)[-1]
    return name


class _Tensors:
    """The tensors that fields name, each once."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self._places: dict[int, int] = {}  # by id; who encodes holds the tensors meanwhile

    def __call__(self, tensor: Tensor | None) -> int:
        """Its place; -1 for none."""
        if tensor is None:
            return -1
        place = self._places.setdefault(id(tensor), len(self.kept))
        if place == len(self.kept):
            self.kept.append(tensor.detach())
        return place


def _bits(value: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits


def _columns(columns: Columns) -> list[int]:
    sizes = [columns.num_heads, columns.head_size, columns.head_stride]
    return [columns.register, columns.start, *sizes]


def _linear(op: LinearOp, tensors: _Tensors) -> list[int]:
    weight = op.weight
    assert isinstance(weight, PackedWeight)
    sizes = [weight.in_features, weight.out_features]
    return [op.input, op.output, tensors(weight.tiles), *sizes, tensors(op.bias), op.leaf]


def _quantized_linear(op: LinearOp, tensors: _Tensors) -> list[int]:
    weight = op.weight
    assert isinstance(weight, PackedQuantized)
    places = [op.input, op.output, tensors(weight.blob)]
    is_exact = int(weight.activations == "exact")
    return [*places, *weight.form, is_exact, tensors(op.bias), op.leaf]


def _norm_fields(op: RMSNormOp | HeadNormOp, tensors: _Tensors) -> list[int]:
    return [tensors(op.weight), _bits(op.eps), _bits(op.weight_offset), int(op.round_first)]


def _rms_norm(op: RMSNormOp, tensors: _Tensors) -> list[int]:
    return [op.input, op.output, *_norm_fields(op, tensors)]


def _layer_norm(op: LayerNormOp, tensors: _Tensors) -> list[int]:
    return [op.input, op.output, tensors(op.weight), tensors(op.bias), _bits(op.eps)]


def _head_norm(op: HeadNormOp, tensors: _Tensors) -> list[int]:
    return [*_columns(op.heads), *_norm_fields(op, tensors)]


def _rope(op: RopeOp, tensors: _Tensors) -> list[int]:
    table = [tensors(op.table.cos), tensors(op.table.sin), tensors(op.table.axes)]
    return [*_columns(op.heads), *table, int(op.is_interleaved), int(op.round_products)]


def _attention(op: AttentionOp, tensors: _Tensors) -> list[int]:
    heads = [*_columns(op.query), *_columns(op.key), *_columns(op.value)]
    options = [_bits(op.scale), op.window or 0, _bits(op.softcap), tensors(op.sinks)]
    return [*heads, op.output, op.group, op.layer, *options]


def _activated(op: GatedActivationOp | ActivationOp, _: _Tensors) -> list[int]:
    return [op.input, op.output, _ACTIVATIONS.index(op.activation)]


def _add(op: AddOp, _: _Tensors) -> list[int]:
    return [op.output, op.input, _bits(op.scale)]


def _scale(op: ScaleOp, _: _Tensors) -> list[int]:
    return [op.output, _bits(op.scale)]


def _copy(op: CopyOp, _: _Tensors) -> list[int]:
    return [op.input, op.output, op.start]


def _call(op: CallOp, _: _Tensors) -> list[int]:
    return [op.input, op.output]


def _tap(op: TapOp, _: _Tensors) -> list[int]:
    return [op.input, op.layer]


def _add_embeds(op: AddEmbedsOp, _: _Tensors) -> list[int]:
    return [op.output, op.level]


# In the order of `kReaders` in program_decode.cpp; linears with quantised weights come last.
_ENCODERS: Sequence[tuple[type, str, Callable[[Any, _Tensors], list[int]]]] = (
    (LinearOp, "linear", _linear),
    (RMSNormOp, "rms_norm", _rms_norm),
    (LayerNormOp, "layer_norm", _layer_norm),
    (HeadNormOp, "head_norm", _head_norm),
    (RopeOp, "rope", _rope),
    (AttentionOp, "attention", _attention),
    (GatedActivationOp, "gated_activation", _activated),
    (ActivationOp, "activation", _activated),
    (AddOp, "add", _add),
    (ScaleOp, "scale", _scale),
    (CopyOp, "copy", _copy),
    (TapOp, "tap", _tap),
    (AddEmbedsOp, "add_embeds", _add_embeds),
    (CallOp, "call", _call),
)
_KINDS = {kind: (number, fields) for number, (kind, _, fields) in enumerate(_ENCODERS)}
_NAMES = {kind: name for kind, name, _ in _ENCODERS}
