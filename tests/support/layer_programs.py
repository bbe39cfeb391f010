"""Small random layer programs, and steps to run them on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.platform.model.attention import GroupStep
from plait.platform.model.native.instructions import (
    AddOp,
    AttentionOp,
    Columns,
    GatedActivationOp,
    HeadNormOp,
    Instruction,
    LinearOp,
    Program,
    RMSNormOp,
    RopeOp,
    RopeTable,
    TapOp,
)
from plait.platform.model.native.reference import ReferenceRunner
from plait.platform.model.native.runner import Runner
from plait.platform.model.native.step import StepInputs
from plait.platform.ops.linear import PackedWeight, pack_linear
from plait.platform.ops.lora import LoraPart, PlacedLora, pack_lora

DTYPES = (torch.float32, torch.bfloat16)
BLOCK_SIZE = 16
MAX_POSITIONS = 256


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a small Llama."""

    width: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    inner: int = 56
    num_layers: int = 2

    @property
    def qkv(self) -> int:
        """Columns of the merged projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


SIZES = Sizes()


class Values:
    """Random tensors of one dtype, the same for a seed."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def rows(self, *shape: int) -> Tensor:
        """Normal values."""
        return torch.randn(*shape, generator=self._generator).to(self.dtype)

    def weight(self, outputs: int, inputs: int) -> PackedWeight:
        """Packed, of a size that keeps rows from growing."""
        return pack_linear(self.rows(outputs, inputs) * inputs**-0.5)

    def lora(self, places: Sequence[tuple[int, int]], rank: int = 4) -> PlacedLora:
        """An adapter of every leaf, whose outputs and inputs `places` tells."""
        parts = {
            leaf: [LoraPart(a=self.rows(rank, inputs), b=self.rows(outputs, rank), scale=0.1)]
            for leaf, (outputs, inputs) in enumerate(places)
        }
        return pack_lora(parts, len(places), self.dtype)


def rope_table(
    dtype: torch.dtype, rotary: int, *, is_interleaved: bool = False, axes: Tensor | None = None
) -> RopeTable:
    """As a rotary module gives it."""
    frequencies = 100.0 ** -(torch.arange(0, rotary, 2) / rotary)
    angles = torch.arange(MAX_POSITIONS)[:, None] * frequencies
    angles = angles.repeat_interleave(2, 1) if is_interleaved else torch.cat([angles, angles], 1)
    cos, sin = (table.to(dtype).float() for table in (angles.cos(), angles.sin()))
    return RopeTable(cos=cos, sin=sin, axes=axes)


def heads_of_qkv(register: int, sizes: Sizes = SIZES) -> tuple[Columns, Columns, Columns]:
    """Queries, keys and values of a merged projection."""
    counts = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    starts = (0, counts[0], counts[0] + counts[1])
    query, key, value = (
        Columns(
            register=register,
            start=start * sizes.head_size,
            num_heads=count,
            head_size=sizes.head_size,
        )
        for start, count in zip(starts, counts, strict=True)
    )
    return query, key, value


def llama_program(
    dtype: torch.dtype,
    *,
    sizes: Sizes = SIZES,
    windows: Sequence[int | None] = (None, 9),
    softcap: float = 0.0,
    has_sinks: bool = False,
    has_head_norms: bool = True,
) -> Program:
    """A decoder of the Llama kind, with a tap before every layer and behind the last."""
    values = Values(dtype)
    table = rope_table(dtype, sizes.head_size)
    query, key, value = heads_of_qkv(2, sizes)
    attended = sizes.num_heads * sizes.head_size
    widths = (sizes.width, sizes.width, sizes.qkv, attended, 2 * sizes.inner, sizes.inner)
    code: list[Instruction] = []
    for layer in range(sizes.num_layers):
        norms = [
            RMSNormOp(
                output=1, input=0, weight=values.rows(sizes.width), eps=1e-5, round_first=True
            )
            for _ in range(2)
        ]
        head_norm = HeadNormOp(heads=query, weight=values.rows(sizes.head_size), eps=1e-6)
        attention = AttentionOp(
            output=3,
            query=query,
            key=key,
            value=value,
            group=0,
            layer=layer,
            scale=0.25,
            window=windows[layer % len(windows)],
            softcap=softcap,
            sinks=values.rows(sizes.num_heads).float() if has_sinks else None,
        )
        linears = [
            LinearOp(
                output=output,
                input=source,
                weight=values.weight(widths[output], widths[source]),
                bias=values.rows(widths[output]) if has_bias else None,
                leaf=4 * layer + place,
                name=f"layers.{layer}.{name}",
            )
            for place, (output, source, has_bias, name) in enumerate(
                [
                    (2, 1, True, "qkv"),
                    (1, 3, False, "o"),
                    (4, 1, False, "up"),
                    (1, 5, False, "down"),
                ]
            )
        ]
        code += [
            TapOp(input=0, layer=layer),
            norms[0],
            linears[0],
            *([head_norm, replace(head_norm, heads=key)] if has_head_norms else []),
            RopeOp(heads=query, table=table),
            RopeOp(heads=key, table=table),
            attention,
            linears[1],
            AddOp(output=0, input=1),
            norms[1],
            linears[2],
            GatedActivationOp(output=5, input=4, activation="silu"),
            linears[3],
            AddOp(output=0, input=1),
        ]
    final = RMSNormOp(output=1, input=0, weight=values.rows(sizes.width), eps=1e-5)
    code += [TapOp(input=0, layer=sizes.num_layers), final]
    return Program(widths=widths, code=tuple(code), output=1)


def places_of(program: Program) -> list[tuple[int, int]]:
    """Outputs and inputs of every leaf that adapters change."""
    linears = [op for op in program.code if isinstance(op, LinearOp) and op.leaf >= 0]
    linears.sort(key=lambda op: op.leaf)
    return [(op.weight.out_features, op.weight.in_features) for op in linears]


def make_step(
    spans: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    *,
    sizes: Sizes = SIZES,
    num_groups: int = 1,
) -> StepInputs:
    """Spans are (rows of the step, length with them); blocks are scattered, K and V random."""
    values = Values(dtype, seed=7)
    counts = [-(-length // BLOCK_SIZE) for _, length in spans]
    ids = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)) + 1
    table = torch.zeros(len(spans), max(counts, default=0), dtype=torch.int32)
    for row, blocks in zip(table, ids.split(counts) if counts else (), strict=True):
        row[: len(blocks)] = blocks
    positions = torch.cat(
        [torch.arange(length - rows, length) for rows, length in spans]
        or [torch.zeros(0, dtype=torch.int64)]
    )
    num_rows = torch.tensor([rows for rows, _ in spans], dtype=torch.int64)
    span_of_row = torch.arange(len(spans)).repeat_interleave(num_rows)
    slots = table[span_of_row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    shape = (sum(counts) + 1, sizes.num_layers, 2, sizes.num_kv_heads, BLOCK_SIZE, sizes.head_size)
    start = torch.tensor([0, *num_rows.cumsum(0).tolist()], dtype=torch.int32)
    return StepInputs(
        positions=positions,
        query_start=start,
        seq_lens=torch.tensor([length for _, length in spans], dtype=torch.int32),
        groups=[GroupStep(values.rows(*shape), slots.long(), table) for _ in range(num_groups)],
    )


def copy_of(step: StepInputs) -> StepInputs:
    """The same, with pages of its own."""
    groups = [GroupStep(g.pages.clone(), g.slot_mapping, g.block_table) for g in step.groups]
    return replace(step, groups=groups)


def run_both(
    program: Program, rows: Tensor, step: StepInputs, *, num_threads: int = 1
) -> tuple[Tensor, Tensor]:
    """Hidden rows by kernels and by the reference, whose pages must be left the same."""
    ours, theirs = copy_of(step), copy_of(step)
    runner = Runner(program, dtype=rows.dtype, num_threads=num_threads)
    hidden = runner.run(rows, ours)
    expected = ReferenceRunner(program).run(rows, theirs)
    runner.close()
    for one, other in zip(ours.groups, theirs.groups, strict=True):
        assert torch.equal(one.pages, other.pages)
    return hidden, expected
