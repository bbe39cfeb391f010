"""A layer program run by torch, instruction by instruction: the oracle of `runner.py`."""

from __future__ import annotations

from typing import Any

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
    LayerNormOp,
    LinearOp,
    Program,
    RMSNormOp,
    RopeOp,
    ScaleOp,
    TapOp,
)
from plait.platform.model.native.ropes import rotate
from plait.platform.model.native.step import StepInputs
from plait.platform.ops.activation import activation
from plait.platform.ops.gated_activation import gated_activation
from plait.platform.ops.kv_write import kv_write
from plait.platform.ops.layer_norm import layer_norm
from plait.platform.ops.linear import linear
from plait.platform.ops.lora import lora_
from plait.platform.ops.paged_attention import paged_attention
from plait.platform.ops.rms_norm import rms_norm


class ReferenceRunner:
    """Runs a program as `Runner` does."""

    takes_tokens = False

    def __init__(self, program: Program) -> None:
        self._program = program

    def embed(self, table: object) -> None:
        """Rows come embedded here."""

    def run(self, rows: Tensor, step: StepInputs) -> Tensor:
        """Hidden rows `[T, D]` for embedded `rows` `[T, D]`."""
        return self._run(rows, step)[0]

    def run_tapped(
        self, rows: Tensor, step: StepInputs, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """`run`, and beside its rows those after so many layers, `[T, len(taps) * D]`."""
        hidden, found = self._run(rows, step)
        return hidden, torch.cat([found[tap] for tap in taps], dim=-1)

    def _run(self, rows: Tensor, step: StepInputs) -> tuple[Tensor, dict[int, Tensor]]:
        registers = [rows.new_empty((len(rows), width)) for width in self._program.widths]
        registers[0].copy_(rows)
        taps: dict[int, Tensor] = {}
        run = _Step(registers, step, taps)
        for op in self._program.code:
            getattr(run, type(op).__name__)(op)
        return registers[self._program.output], taps


class _Step:
    """One method for each instruction, of its name."""

    def __init__(self, registers: list[Tensor], step: StepInputs, taps: dict[int, Tensor]) -> None:
        self.r = registers
        self.step = step
        self.taps = taps

    def heads(self, columns: Columns) -> Tensor:
        """A view `[T, H, D]`."""
        rows = self.r[columns.register][:, columns.start : columns.start + columns.width]
        return rows.unfold(1, columns.head_size, columns.head_stride)

    def LinearOp(self, op: LinearOp) -> None:  # noqa: N802
        x = self.r[op.input]
        out = linear(x, op.weight, op.bias)
        lora = self.step.lora
        if lora is not None and op.leaf >= 0 and lora.changes(op.leaf):
            lora_(out, x, lora, op.leaf)
        self.r[op.output].copy_(out)

    def _rms_norm(self, x: Tensor, op: Any) -> Tensor:
        return rms_norm(
            x, op.weight, op.eps, weight_offset=op.weight_offset, round_first=op.round_first
        )

    def RMSNormOp(self, op: RMSNormOp) -> None:  # noqa: N802
        self.r[op.output].copy_(self._rms_norm(self.r[op.input], op))

    def HeadNormOp(self, op: HeadNormOp) -> None:  # noqa: N802
        heads = self.heads(op.heads)
        heads.copy_(self._rms_norm(heads, op))

    def LayerNormOp(self, op: LayerNormOp) -> None:  # noqa: N802
        self.r[op.output].copy_(layer_norm(self.r[op.input], op.weight, op.bias, op.eps))

    def RopeOp(self, op: RopeOp) -> None:  # noqa: N802
        positions, table = self.step.positions, op.table
        if positions.dim() == 1 or table.axes is None:
            at = positions if positions.dim() == 1 else positions[0]
            cos, sin = table.cos[at], table.sin[at]
        else:
            column = torch.arange(table.cos.shape[1])[:, None]
            at = positions[table.axes.long()]  # [rotary, T]
            cos, sin = table.cos[at, column].T, table.sin[at, column].T
        heads = self.heads(op.heads)
        turned = rotate(
            heads.transpose(0, 1), cos, sin,
            is_interleaved=op.is_interleaved, round_products=op.round_products,
        )  # fmt: skip
        heads.copy_(turned.transpose(0, 1))

    def AttentionOp(self, op: AttentionOp) -> None:  # noqa: N802
        step, group = self.step, self.step.groups[op.group]
        key, value = self.heads(op.key), self.heads(op.value)
        kv_write(group.pages, op.layer, key, value, group.slot_mapping)
        output = paged_attention(
            self.heads(op.query), group.pages, op.layer, group.block_table, step.query_start,
            step.seq_lens, scale=op.scale, window=op.window, softcap=op.softcap or None,
            sinks=op.sinks, ranges=step.ranges,
        )  # fmt: skip
        self.r[op.output].copy_(output[:, :, : value.shape[-1]].flatten(1))

    def GatedActivationOp(self, op: GatedActivationOp) -> None:  # noqa: N802
        self.r[op.output].copy_(gated_activation(self.r[op.input], op.activation))

    def ActivationOp(self, op: ActivationOp) -> None:  # noqa: N802
        self.r[op.output].copy_(activation(self.r[op.input], op.activation))

    def AddOp(self, op: AddOp) -> None:  # noqa: N802
        added = self.r[op.input]
        self.r[op.output] += added if op.scale == 1.0 else added * op.scale

    def ScaleOp(self, op: ScaleOp) -> None:  # noqa: N802
        self.r[op.output] *= op.scale

    def CopyOp(self, op: CopyOp) -> None:  # noqa: N802
        output = self.r[op.output]
        output.copy_(self.r[op.input][:, op.start : op.start + output.shape[1]])

    def TapOp(self, op: TapOp) -> None:  # noqa: N802
        self.taps[op.layer] = self.r[op.input].clone()

    def AddEmbedsOp(self, op: AddEmbedsOp) -> None:  # noqa: N802
        embeds, rows = self.step.embeds, self.step.image_rows
        if embeds is None or rows is None:
            return
        target = self.r[op.output]
        width = target.shape[1]
        level = embeds[:, op.level * width : (op.level + 1) * width]
        target[rows] = target[rows] + level.to(target.dtype)

    def CallOp(self, op: CallOp) -> None:  # noqa: N802
        self.r[op.output].copy_(op.module(self.r[op.input]))  # type: ignore[operator]
