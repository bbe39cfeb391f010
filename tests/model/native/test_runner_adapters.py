"""Adapters so large that they are run between the tiles of a linear give the bits of the op."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.layer_programs import DTYPES, Values, make_step
from torch import Tensor

from plait.platform.model.native.instructions import LinearOp, Program
from plait.platform.model.native.runner import Runner
from plait.platform.ops.linear import linear
from plait.platform.ops.lora import LoraPart, LoraSegments, PlacedLora, lora_, pack_lora
from plait.platform.ops.quantized_weight import Activations, pack_quantized, quantize

INPUTS = 200
PARTS = ((0, 333, 17), (333, 40, 64), (390, 310, 16))  # start, outputs and rank, as q, k and v
OUTPUTS = 700


def adapter(dtype: torch.dtype, seed: int, kept_as: torch.dtype | None = None) -> PlacedLora:
    """About 200 KB in bf16; the second part in the manner of DoRA."""
    values = Values(dtype, seed)
    parts = [
        LoraPart(
            a=values.rows(rank, INPUTS) / INPUTS,
            b=values.rows(outputs, rank),
            scale=0.5,
            start=start,
            b_bias=values.rows(outputs).float() if start == 333 else None,
            g=values.rows(outputs).float() if start == 333 else None,
        )
        for start, outputs, rank in PARTS
    ]
    return pack_lora({0: parts}, 1, kept_as or dtype)


def segments_of(kind: str, num_rows: int, adapters: Sequence[PlacedLora]) -> LoraSegments:
    """A row each; rows that share some, among others without; or several for the same rows."""
    if kind == "one row each":
        return LoraSegments(
            (row, row + 1, adapters[row % len(adapters)], 1.0) for row in range(num_rows)
        )
    if kind == "shared":
        last = num_rows - 1
        changed = ((1, 3, 1.0), (5, last, 0.3), (last, num_rows, -1.0))
        return LoraSegments(
            (start, end, adapter, scale)
            for (start, end, scale), adapter in zip(changed, adapters, strict=True)
        )
    several = [(0, 9, adapter, 1.0) for adapter in adapters]
    return LoraSegments([*several, (4, num_rows, adapters[0], 2.0)])


def run(op: LinearOp, rows: Tensor, segments: LoraSegments, num_threads: int) -> Tensor:
    program = Program(widths=(INPUTS, OUTPUTS), code=(op,), output=1)
    step = replace(make_step([(len(rows), len(rows))], rows.dtype), lora=segments)
    runner = Runner(program, dtype=rows.dtype, num_threads=num_threads)
    hidden = runner.run(rows, step)
    runner.close()
    return hidden


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("weights", ["packed", "exact", "int8"])
@pytest.mark.parametrize("kind", ["one row each", "shared", "several for a row"])
@pytest.mark.parametrize("kept_as", [None, torch.int8], ids=["", "codes"])
def test_adapters_between_tiles_give_the_bits_of_adapters_after_them(
    dtype: torch.dtype, weights: Activations | str, kind: str, kept_as: torch.dtype | None
) -> None:
    values = Values(dtype)
    matrix = values.rows(OUTPUTS, INPUTS) * INPUTS**-0.5
    adapters = [adapter(dtype, seed, kept_as) for seed in range(3)]
    for num_rows in (12, 33, 230):  # the last ones are more than a chunk of some weights
        rows = values.rows(num_rows, INPUTS)
        segments = segments_of(kind, num_rows, adapters)
        for bits in (4, 8):
            if weights == "packed":
                op = LinearOp(output=1, input=0, weight=values.weight(OUTPUTS, INPUTS), leaf=0)
            else:
                quantized = quantize(matrix, bits=bits, group=32)
                weight = pack_quantized(quantized, activations=weights)
                op = LinearOp(output=1, input=0, weight=weight, leaf=0)
            expected = linear(rows, op.weight)
            lora_(expected, rows, segments, 0)
            for num_threads in (1, 2):
                assert torch.equal(run(op, rows, segments, num_threads), expected)
