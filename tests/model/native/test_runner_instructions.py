"""Every instruction alone gives the bits of the op, or of the torch code, that it stands for."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from support.layer_programs import DTYPES, Sizes, Values, make_step, rope_table, run_both
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
)
from plait.platform.ops.activation import activation
from plait.platform.ops.layer_norm import layer_norm
from plait.platform.ops.quantized_weight import Activations, pack_quantized, quantize

NUM_ROWS = (1, 2, 7, 64)
HEADS = Columns(register=1, start=5, num_heads=3, head_size=10)

every_size = pytest.mark.parametrize("num_rows", NUM_ROWS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def run_one(
    instruction: Instruction,
    x: Tensor,
    *,
    out_width: int,
    extra: Sequence[int] = (),
    before: Sequence[Instruction] = (),
) -> tuple[Tensor, Tensor]:
    """Registers: 0 the rows, 1 the output, which they are copied to where it is as wide."""
    copies = [CopyOp(output=1, input=0)] if out_width == x.shape[1] else []
    widths = (x.shape[1], out_width, *extra)
    program = Program(widths=widths, code=(*copies, *before, instruction), output=1)
    step = make_step([(len(x), len(x))], x.dtype)
    return run_both(program, x, step, num_threads=2)


@every_size
@every_dtype
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(num_rows: int, dtype: torch.dtype, has_bias: bool) -> None:
    values = Values(dtype)
    bias = values.rows(37) if has_bias else None
    op = LinearOp(output=1, input=0, weight=values.weight(37, 51), bias=bias)
    ours, theirs = run_one(op, values.rows(num_rows, 51), out_width=37)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 200])
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_linear_over_a_quantised_weight(
    num_rows: int, dtype: torch.dtype, bits: int, group: int, activations: Activations
) -> None:
    values = Values(dtype)
    quantized = quantize(values.rows(37, 101), bits=bits, group=group)
    weight = pack_quantized(quantized, activations=activations)
    op = LinearOp(output=1, input=0, weight=weight, bias=values.rows(37))
    ours, theirs = run_one(op, values.rows(num_rows, 101), out_width=37)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
@pytest.mark.parametrize("options", [(0.0, True), (0.0, False), (1.0, False)])
def test_rms_norm(num_rows: int, dtype: torch.dtype, options: tuple[float, bool]) -> None:
    values = Values(dtype)
    offset, round_first = options
    op = RMSNormOp(
        output=1,
        input=0,
        weight=values.rows(45),
        eps=1e-5,
        weight_offset=offset,
        round_first=round_first,
    )
    ours, theirs = run_one(op, values.rows(num_rows, 45), out_width=45)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
def test_head_norm(num_rows: int, dtype: torch.dtype) -> None:
    values = Values(dtype)
    op = HeadNormOp(heads=HEADS, weight=values.rows(10), eps=1e-6, round_first=True)
    ours, theirs = run_one(op, values.rows(num_rows, 40), out_width=40)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
@pytest.mark.parametrize("parts", ["weight and bias", "weight", "nothing"])
def test_layer_norm(num_rows: int, dtype: torch.dtype, parts: str) -> None:
    values = Values(dtype)
    x, weight, bias = values.rows(num_rows, 45), values.rows(45), values.rows(45)
    op = LayerNormOp(
        output=1,
        input=0,
        weight=weight if "weight" in parts else None,
        bias=bias if "bias" in parts else None,
        eps=1e-5,
    )
    ours, _ = run_one(op, x, out_width=45)
    assert torch.equal(ours, layer_norm(x, op.weight, op.bias, op.eps))


@every_size
@every_dtype
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("round_products", [False, True])
@pytest.mark.parametrize("rotary", [6, 10])
def test_rope(
    num_rows: int, dtype: torch.dtype, is_interleaved: bool, round_products: bool, rotary: int
) -> None:
    op = RopeOp(
        heads=HEADS,
        table=rope_table(dtype, rotary, is_interleaved=is_interleaved),
        is_interleaved=is_interleaved,
        round_products=round_products,
    )
    ours, theirs = run_one(op, Values(dtype).rows(num_rows, 40), out_width=40)
    assert torch.equal(ours, theirs)


@every_dtype
def test_heads_that_lie_apart(dtype: torch.dtype) -> None:
    heads = [
        Columns(register=1, start=16 * part, num_heads=2, head_size=16, stride=48)
        for part in range(3)
    ]
    table = rope_table(dtype, 8)
    attention = AttentionOp(
        output=2, query=heads[0], key=heads[1], value=heads[2], group=0, layer=1, scale=0.3
    )
    ropes = [RopeOp(heads=columns, table=table) for columns in heads[:2]]
    code = (CopyOp(output=1, input=0), *ropes, attention)
    program = Program(widths=(96, 96, 32), code=code, output=2)
    step = make_step([(1, 20), (6, 33)], dtype)
    ours, theirs = run_both(program, Values(dtype).rows(7, 96), step)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
def test_columns_are_copied(num_rows: int, dtype: torch.dtype) -> None:
    x = Values(dtype).rows(num_rows, 50)
    for start in (0, 7, 30):
        op = CopyOp(output=1, input=0, start=start)
        ours, theirs = run_one(op, x, out_width=20)
        assert torch.equal(ours, x[:, start : start + 20])
        assert torch.equal(theirs, ours)


@every_dtype
@pytest.mark.parametrize("has_grid", [False, True])
def test_rope_of_a_grid(dtype: torch.dtype, has_grid: bool) -> None:
    axes = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 0, 1], dtype=torch.int32)
    op = RopeOp(heads=HEADS, table=rope_table(dtype, 10, axes=axes))
    x = Values(dtype).rows(7, 40)
    step = make_step([(7, 30)], dtype)
    if has_grid:
        grid = torch.randint(200, (3, 7), generator=torch.Generator().manual_seed(1))
        step = replace(step, positions=grid)
    program = Program(widths=(40, 40), code=(CopyOp(output=1, input=0), op), output=1)
    ours, theirs = run_both(program, x, step)
    assert torch.equal(ours, theirs)


@every_dtype
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_ranges", [False, True])
@pytest.mark.parametrize("value_size", [16, 8])
def test_attention(
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
    has_sinks: bool,
    has_ranges: bool,
    value_size: int,
) -> None:
    values = Values(dtype)
    query = Columns(register=0, start=0, num_heads=4, head_size=16)
    key = Columns(register=0, start=64, num_heads=2, head_size=16)
    value = Columns(register=0, start=96, num_heads=2, head_size=value_size)
    op = AttentionOp(
        output=1,
        query=query,
        key=key,
        value=value,
        group=1,
        layer=1,
        scale=0.3,
        window=window,
        softcap=softcap,
        sinks=values.rows(4).float() if has_sinks else None,
    )
    step = make_step([(1, 20), (6, 33), (1, 1), (9, 9)], dtype, num_groups=2)
    if has_ranges:
        ranges = torch.tensor([[1, 29, 32], [3, 2, 7]], dtype=torch.int32)
        step = replace(step, ranges=ranges)
    program = Program(widths=(128, 4 * value_size), code=(op,), output=1)
    ours, theirs = run_both(program, values.rows(17, 128), step, num_threads=2)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu"])
def test_gated_activation(num_rows: int, dtype: torch.dtype, name: str) -> None:
    op = GatedActivationOp(output=1, input=0, activation=name)
    ours, theirs = run_one(op, Values(dtype).rows(num_rows, 54), out_width=27)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu", "quick_gelu"])
def test_activation(num_rows: int, dtype: torch.dtype, name: str) -> None:
    x = Values(dtype).rows(num_rows, 27)
    ours, _ = run_one(ActivationOp(output=1, input=0, activation=name), x, out_width=27)
    assert torch.equal(ours, activation(x, name))


@every_size
@every_dtype
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_add(num_rows: int, dtype: torch.dtype, scale: float) -> None:
    op = AddOp(output=1, input=0, scale=scale)
    ours, theirs = run_one(op, Values(dtype).rows(num_rows, 27), out_width=27)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
def test_scale(num_rows: int, dtype: torch.dtype) -> None:
    ours, theirs = run_one(
        ScaleOp(output=1, scale=0.37), Values(dtype).rows(num_rows, 27), out_width=27
    )
    assert torch.equal(ours, theirs)


@every_dtype
@pytest.mark.parametrize("level", [0, 2])
def test_embeds_are_added_to_rows_of_images(dtype: torch.dtype, level: int) -> None:
    values = Values(dtype)
    step = replace(
        make_step([(9, 9)], dtype),
        embeds=values.rows(3, 3 * 20),
        image_rows=torch.tensor([0, 4, 8]),
    )
    op = AddEmbedsOp(output=1, level=level)
    program = Program(widths=(20, 20), code=(CopyOp(output=1, input=0), op), output=1)
    ours, theirs = run_both(program, values.rows(9, 20), step)
    assert torch.equal(ours, theirs)


@every_size
@every_dtype
def test_a_module_of_torch_is_called_in_between(num_rows: int, dtype: torch.dtype) -> None:
    double: Callable[[Tensor], Tensor] = lambda x: torch.cat([x, x.neg()], 1)  # noqa: E731
    calls = [
        CallOp(output=2, input=0, module=double, name="double"),
        CallOp(output=3, input=2, module=double, name="double"),
    ]
    program = Program(
        widths=(20, 80, 40, 80),
        code=(*calls, CopyOp(output=1, input=3), ScaleOp(output=1, scale=0.5)),
        output=1,
    )
    x = Values(dtype).rows(num_rows, 20)
    ours, theirs = run_both(program, x, make_step([(num_rows, num_rows)], dtype))
    assert torch.equal(ours, theirs)


def test_work_worth_threads_has_the_same_bits() -> None:
    values = Values(torch.float32)
    sizes = Sizes(width=640, num_layers=1)
    op = LinearOp(output=1, input=0, weight=values.weight(1536, 640))
    program = Program(widths=(640, 1536), code=(op,), output=1)
    rows, step = values.rows(64, 640), make_step([(64, 64)], torch.float32, sizes=sizes)
    one, reference = run_both(program, rows, step, num_threads=1)
    three, _ = run_both(program, rows, step, num_threads=3)
    assert torch.equal(one, reference)
    assert torch.equal(one, three)
