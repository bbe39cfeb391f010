"""Whole programs: the bits of the reference, and of each request alone."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.layer_programs import (
    DTYPES,
    SIZES,
    Sizes,
    Values,
    copy_of,
    llama_program,
    make_step,
    places_of,
    run_both,
)
from torch import Tensor

from plait.platform.model.attention import GroupStep
from plait.platform.model.native.instructions import CallOp, CopyOp, Program
from plait.platform.model.native.reference import ReferenceRunner
from plait.platform.model.native.runner import Runner
from plait.platform.model.native.step import StepInputs
from plait.platform.ops.linear import PackedWeight, pack_linear
from plait.platform.ops.lora import LoraSegments
from plait.platform.ops.packed_rows import packed_rows
from plait.platform.ops.quantized_weight import PackedQuantized, pack_quantized, quantize

SPANS = ((1, 20), (7, 40), (1, 1), (18, 18), (3, 100))
NUM_ROWS = sum(rows for rows, _ in SPANS)

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
every_kind = pytest.mark.parametrize(
    "options",
    [{}, {"windows": (3,), "softcap": 30.0}, {"has_sinks": True, "has_head_norms": False}],
    ids=["plain", "window and softcap", "sinks"],
)


def rows_of(dtype: torch.dtype, num_rows: int = NUM_ROWS) -> Tensor:
    return Values(dtype, seed=5).rows(num_rows, SIZES.width)


def segments(program: Program, dtype: torch.dtype) -> list[tuple[int, int, object, float]]:
    """Two adapters: one of two spans, and both on the rows of the fourth."""
    first, second = (Values(dtype, seed).lora(places_of(program)) for seed in (21, 22))
    return [(1, 8, first, 1.0), (9, 27, first, 0.5), (9, 27, second, 2.0)]


def ranged(step: StepInputs) -> StepInputs:
    ranges = torch.tensor([[1, 34, 38], [3, 2, 11]], dtype=torch.int32)
    return replace(step, ranges=ranges)


@every_dtype
@every_kind
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("has_ranges", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_decoder_gives_the_bits_of_the_reference(
    dtype: torch.dtype,
    options: dict[str, object],
    has_adapters: bool,
    has_ranges: bool,
    num_threads: int,
) -> None:
    program = llama_program(dtype, **options)
    step = make_step(SPANS, dtype)
    if has_ranges:
        step = ranged(step)
    if has_adapters:
        step = replace(step, lora=LoraSegments(segments(program, dtype)))
    ours, theirs = run_both(program, rows_of(dtype), step, num_threads=num_threads)
    assert torch.isfinite(ours).all()
    assert torch.equal(ours, theirs)


def alone(step: StepInputs, span: int) -> tuple[StepInputs, slice]:
    """One span as a step of its own, over the same pages."""
    start, stop = step.query_start[span : span + 2].tolist()
    rows = slice(start, stop)
    groups = [
        GroupStep(g.pages, g.slot_mapping[rows], g.block_table[span : span + 1])
        for g in step.groups
    ]
    ranges = None
    if step.ranges is not None:
        ranges = step.ranges[step.ranges[:, 0] == span].clone()
        ranges[:, 0] = 0
    lora = None
    if step.lora is not None:
        entries = [
            (max(first, start) - start, min(end, stop) - start, placed, scale)
            for first, end, placed, scale in step.lora.entries
            if first < stop and end > start
        ]
        lora = LoraSegments(entries) if entries else None
    return (
        replace(
            step,
            positions=step.positions[rows],
            query_start=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=step.seq_lens[span : span + 1],
            groups=groups,
            ranges=ranges,
            lora=lora,
        ),
        rows,
    )


@every_dtype
@every_kind
def test_rows_have_the_same_bits_alone_and_together(
    dtype: torch.dtype, options: dict[str, object]
) -> None:
    program = llama_program(dtype, **options)
    step = ranged(make_step(SPANS, dtype))
    step = replace(step, lora=LoraSegments(segments(program, dtype)))
    rows = rows_of(dtype)
    runner = Runner(program, dtype=dtype, num_threads=2)
    taps = (0, 2, 1)
    together, tapped = runner.run_tapped(rows, copy_of(step), taps)
    for span in range(len(SPANS)):
        single, where = alone(copy_of(step), span)
        hidden, rows_tapped = runner.run_tapped(rows[where], single, taps)
        assert torch.equal(hidden, together[where])
        assert torch.equal(rows_tapped, tapped[where])


@every_dtype
def test_rows_between_layers_are_tapped_in_the_order_asked_for(dtype: torch.dtype) -> None:
    program = llama_program(dtype)
    rows, step = rows_of(dtype), make_step(SPANS, dtype)
    runner = Runner(program, dtype=dtype, num_threads=1)
    for taps in ((2,), (1, 0), (0, 2, 2)):
        ours = runner.run_tapped(rows, copy_of(step), taps)
        theirs = ReferenceRunner(program).run_tapped(rows, copy_of(step), taps)
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_adapters_that_change_nothing_leave_base_rows_as_they_are() -> None:
    program = llama_program(torch.float32)
    rows, step = rows_of(torch.float32), make_step(SPANS, torch.float32)
    runner = Runner(program, dtype=torch.float32, num_threads=1)
    plain = runner.run(rows, copy_of(step))
    lora = LoraSegments(segments(program, torch.float32))
    changed = runner.run(rows, replace(copy_of(step), lora=lora))
    has_adapter = torch.zeros(NUM_ROWS, dtype=torch.bool)
    has_adapter[1:8] = has_adapter[9:27] = True
    assert torch.equal(plain[~has_adapter], changed[~has_adapter])
    assert not (plain == changed).all(1)[has_adapter].any()


@every_dtype
def test_a_module_of_torch_in_every_layer_changes_no_bits(dtype: torch.dtype) -> None:
    program = llama_program(dtype)
    size = len(program.code) // SIZES.num_layers
    call = CallOp(output=1, input=0, module=torch.clone, name="layers.0.clone")
    code = [*program.code]
    for start in (size, 0):
        code[start:start] = [call, CopyOp(output=0, input=1)]
    rows, step = rows_of(dtype), make_step(SPANS, dtype)
    called, _ = run_both(replace(program, code=tuple(code)), rows, step)
    plain, _ = run_both(program, rows, step)
    assert torch.equal(called, plain)


@pytest.mark.parametrize("spans", [(), ((0, 0),), ((0, 5), (2, 9), (0, 0))])
def test_steps_without_rows_and_spans_without_rows(spans: Sequence[tuple[int, int]]) -> None:
    program = llama_program(torch.float32)
    num_rows = sum(rows for rows, _ in spans)
    step = make_step(spans, torch.float32)
    ours, theirs = run_both(program, rows_of(torch.float32, num_rows), step)
    assert torch.equal(ours, theirs)


def test_a_step_larger_than_all_before_it_and_a_smaller_one_after() -> None:
    program = llama_program(torch.float32)
    runner = Runner(program, dtype=torch.float32, num_threads=2)
    for length in (1, 200, 3, 64, 201, 1):
        step = make_step([(length, length)], torch.float32)
        rows = rows_of(torch.float32, length)
        expected = ReferenceRunner(program).run(rows, copy_of(step))
        assert torch.equal(runner.run(rows, step), expected)


@every_dtype
def test_threads_change_no_bits_where_there_is_work_for_them(dtype: torch.dtype) -> None:
    sizes = Sizes(width=256, num_heads=8, num_kv_heads=2, head_size=32, inner=512)
    program = llama_program(dtype, sizes=sizes)
    spans = [(150, 150), (1, 90), (40, 200)]
    rows = Values(dtype).rows(191, sizes.width)
    step = make_step(spans, dtype, sizes=sizes)
    results = [run_both(program, rows, step, num_threads=n) for n in (1, 2, 5)]
    assert all(torch.equal(ours, theirs) for ours, theirs in results)
    assert all(torch.equal(ours, results[0][0]) for ours, _ in results)


def test_time_bytes_and_operations_are_counted_by_kind_and_rows() -> None:
    program = llama_program(torch.float32)
    runner = Runner(program, dtype=torch.float32, num_threads=1)
    for length in (1, 4):
        step = make_step([(length, 20)], torch.float32)
        runner.run(rows_of(torch.float32, length), step)
    counts = {(c.phase, c.rows): c for c in runner.counters()}
    assert {rows for _, rows in counts} == {"1", "2-8"}
    qkv = counts["qkv", "2-8"]
    assert (qkv.calls, qkv.num_bytes) == (2, 2 * 4 * SIZES.qkv * SIZES.width)
    assert qkv.operations == 2 * 2 * 4 * SIZES.qkv * SIZES.width
    assert qkv.nanoseconds > 0
    assert qkv.gb_per_s == qkv.num_bytes / qkv.nanoseconds
    # Twenty keys in one layer, those of a window of nine in the other; two halves of fp32.
    assert counts["attention", "1"].num_bytes == (20 + 9) * 2 * 2 * SIZES.head_size * 4
    assert counts["attention", "2-8"].num_bytes == (20 + 12) * 2 * 2 * SIZES.head_size * 4
    pairs = sum(range(17, 21)) + 4 * 9
    assert counts["attention", "2-8"].operations == pairs * SIZES.num_heads * 4 * SIZES.head_size
    assert counts["rms_norm", "1"].calls == 5
    assert not any(phase == "lora" for phase, _ in counts)


def test_what_adapters_take_is_counted_apart() -> None:
    program = llama_program(torch.float32)
    runner = Runner(program, dtype=torch.float32, num_threads=1)
    step = make_step(SPANS, torch.float32)
    lora = LoraSegments(segments(program, torch.float32))
    runner.run(rows_of(torch.float32), replace(step, lora=lora))
    (count,) = [c for c in runner.counters(reset=True) if c.phase == "lora"]
    assert count.calls == 8
    weights = sum(4 * (outputs + inputs) for outputs, inputs in places_of(program))
    assert count.num_bytes == 3 * 4 * weights
    assert count.operations == 2 * weights * (7 + 18 + 18)
    assert runner.counters() == []


def tables(weight: Tensor) -> dict[str, Tensor | PackedWeight | PackedQuantized]:
    """A table `[V, D]` as embeddings keep it."""
    codes = quantize(weight.float(), bits=4, group=32)
    return {
        "table": weight,
        "packed": pack_linear(weight),
        "codes": pack_quantized(codes, activations="int8"),
    }


@every_dtype
@pytest.mark.parametrize("form", ["table", "packed", "codes"])
def test_tokens_in_the_place_of_rows_give_the_same_bits(dtype: torch.dtype, form: str) -> None:
    runner = Runner(llama_program(dtype), dtype=dtype, num_threads=1)
    table = tables(Values(dtype, seed=9).rows(77, SIZES.width))[form]
    token_ids = torch.arange(NUM_ROWS) * 31 % 77
    rows = table[token_ids] if isinstance(table, Tensor) else packed_rows(table, token_ids, dtype)
    step = make_step(SPANS, dtype)
    expected = runner.run(rows, copy_of(step))
    assert not runner.takes_tokens
    with pytest.raises(RuntimeError, match="embeds no tokens"):
        runner.run(token_ids, copy_of(step))
    runner.embed(table)
    assert runner.takes_tokens
    assert torch.equal(runner.run(token_ids, copy_of(step)), expected)
    assert torch.equal(runner.run(rows, copy_of(step)), expected)
    for wrong in (-1, 77):
        token_ids[3] = wrong
        with pytest.raises(RuntimeError, match=f"token {wrong} is not one of 77"):
            runner.run(token_ids, copy_of(step))


def test_a_table_of_another_form_is_refused_and_one_of_another_dtype_left_alone() -> None:
    runner = Runner(llama_program(torch.float32), dtype=torch.float32, num_threads=1)
    runner.embed(torch.zeros(77, SIZES.width, dtype=torch.bfloat16))
    assert not runner.takes_tokens
    with pytest.raises(RuntimeError, match="columns"):
        runner.embed(torch.zeros(77, SIZES.width + 1))
    with pytest.raises(RuntimeError, match="of its form"):
        torch.ops.plait.program_embedding(
            runner.handle, torch.zeros(77, SIZES.width), (SIZES.width, 78)
        )
