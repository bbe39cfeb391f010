"""Programs and steps that do not fit are errors that name what is wrong; runners leave nothing."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layer_programs import (
    SIZES,
    Values,
    heads_of_qkv,
    llama_program,
    make_step,
    places_of,
    rope_table,
)

from plait.platform.errors import InternalError
from plait.platform.model.attention import GroupStep
from plait.platform.model.native.instructions import (
    AddEmbedsOp,
    AddOp,
    AttentionOp,
    CallOp,
    CopyOp,
    GatedActivationOp,
    HeadNormOp,
    Instruction,
    LinearOp,
    Program,
    RMSNormOp,
    RopeOp,
)
from plait.platform.model.native.runner import Runner
from plait.platform.model.native.step import StepInputs
from plait.platform.ops.linear import linear
from plait.platform.ops.lora import LoraSegments

VALUES = Values(torch.float32)
QUERY, KEY, VALUE = heads_of_qkv(0)
ATTENTION = AttentionOp(output=1, query=QUERY, key=KEY, value=VALUE, group=0, layer=0, scale=1.0)


def new_runner(program: Program, **options: Any) -> Runner:
    return Runner(program, dtype=torch.float32, **{"num_threads": 1, **options})


def of(*code: Instruction, widths: tuple[int, ...] = (SIZES.qkv, 64)) -> Program:
    return Program(widths=widths, code=code, output=1)


WRONG_PROGRAMS: dict[str, tuple[Program, str]] = {
    "no such register": (of(CopyOp(output=1, input=2)), "register 2"),
    "nothing written yet": (
        of(CopyOp(output=1, input=1), widths=(8, 8)),
        "register 1, which nothing has written",
    ),
    "columns beyond the input": (
        of(CopyOp(output=1, input=0, start=SIZES.qkv - 63)),
        "copies columns 65 to 129 of register 0, which has 128",
    ),
    "no output": (of(), "nothing writes the output"),
    "no columns": (of(widths=(0, 1)), "0 columns"),
    "weight of other inputs": (
        of(LinearOp(output=1, input=0, weight=VALUES.weight(64, 10), name="layers.7.q")),
        r"instruction 0 \(layers.7.q\) takes 10 inputs, register 0 has 128",
    ),
    "weight of other outputs": (
        of(LinearOp(output=1, input=0, weight=VALUES.weight(63, 128))),
        "gives 63 outputs",
    ),
    "weight of another dtype": (
        of(LinearOp(output=1, input=0, weight=Values(torch.bfloat16).weight(64, 128))),
        "another dtype",
    ),
    "linear in place": (
        of(LinearOp(output=0, input=0, weight=VALUES.weight(128, 128))),
        "writes the register that it reads",
    ),
    "bias too short": (
        of(LinearOp(output=1, input=0, weight=VALUES.weight(64, 128), bias=torch.zeros(63))),
        r"bias of shape \[63\], not \[64\]",
    ),
    "norm of integers": (
        of(
            RMSNormOp(output=1, input=0, weight=torch.zeros(64, dtype=torch.int32), eps=0.0),
            widths=(64, 64),
        ),
        "neither float32 nor bfloat16",
    ),
    "norm without a number": (
        of(RMSNormOp(output=1, input=0, weight=torch.zeros(64), eps=float("nan")), widths=(64, 64)),
        "eps nan",
    ),
    "heads beyond the register": (
        of(HeadNormOp(heads=replace(QUERY, start=80), weight=torch.zeros(16), eps=0.0)),
        "columns 80 to 144 of register 0, which has 128",
    ),
    "rope wider than a head": (
        of(RopeOp(heads=QUERY, table=rope_table(torch.float32, 18))),
        "rotates 18 values of heads of 16",
    ),
    "axes beyond three": (
        of(
            RopeOp(
                heads=QUERY,
                table=rope_table(torch.float32, 16, axes=torch.full((16,), 3, dtype=torch.int32)),
            )
        ),
        "axis 3",
    ),
    "query heads that do not divide": (
        of(replace(ATTENTION, query=replace(QUERY, num_heads=3)), widths=(128, 48)),
        "no multiple of its 2 KV heads",
    ),
    "values wider than queries": (
        of(replace(ATTENTION, query=replace(QUERY, head_size=8)), widths=(128, 32)),
        "wider than its queries",
    ),
    "attention into another width": (of(ATTENTION, widths=(128, 60)), "gives 64 columns"),
    "attention without scale": (of(replace(ATTENTION, scale=0.0)), "scale 0"),
    "sinks of other heads": (
        of(replace(ATTENTION, sinks=torch.zeros(3))),
        r"sinks of shape \[3\]",
    ),
    "halves that do not fit": (
        of(GatedActivationOp(output=1, input=0, activation="silu"), widths=(10, 4)),
        "halves 10 columns into 4",
    ),
    "sum of other widths": (of(AddOp(output=0, input=0), AddOp(output=1, input=0)), "register 1"),
}


@pytest.mark.parametrize("name", WRONG_PROGRAMS)
def test_a_program_that_does_not_fit_is_refused(name: str) -> None:
    program, message = WRONG_PROGRAMS[name]
    with pytest.raises(RuntimeError, match=message):
        new_runner(program)


def test_threads_and_cores_that_there_are_not() -> None:
    program = llama_program(torch.float32)
    with pytest.raises(RuntimeError, match="0 threads"):
        new_runner(program, num_threads=0)
    with pytest.raises(RuntimeError, match="1 cores are named for 2 threads"):
        new_runner(program, num_threads=2, pin=[0])
    with pytest.raises(RuntimeError, match="core 9999"):
        new_runner(program, pin=[9999])


def with_group(step: StepInputs, **changes: Any) -> StepInputs:
    (group,) = step.groups
    fields = {name: getattr(group, name) for name in ("pages", "slot_mapping", "block_table")}
    return replace(step, groups=[GroupStep(**{**fields, **changes})])


def put(values: torch.Tensor, place: int, value: int) -> torch.Tensor:
    changed = values.clone()
    changed.view(-1)[place] = value
    return changed


WRONG_STEPS: dict[str, tuple[Callable[[StepInputs], StepInputs], str]] = {
    "position beyond the table": (
        lambda s: replace(s, positions=put(s.positions, 2, 256)),
        "position 256",
    ),
    "negative position": (lambda s: replace(s, positions=put(s.positions, 0, -1)), "position -1"),
    "positions of a grid": (
        lambda s: replace(s, positions=s.positions.expand(3, -1).contiguous()),
        "rope is not",
    ),
    "positions of other rows": (lambda s: replace(s, positions=s.positions[1:]), "positions must"),
    "spans that fall": (
        lambda s: replace(s, query_start=put(s.query_start, 1, 9)),
        "query_start falls|rows",
    ),
    "spans that end early": (
        lambda s: replace(s, query_start=put(s.query_start, 2, 3)),
        "query_start must lead from 0 to the 4 rows",
    ),
    "lengths of another dtype": (lambda s: replace(s, seq_lens=s.seq_lens.long()), "seq_lens must"),
    "shorter than its rows": (
        lambda s: replace(s, seq_lens=put(s.seq_lens, 0, 2)),
        "seq_lens says",
    ),
    "longer than its blocks": (
        lambda s: replace(s, seq_lens=put(s.seq_lens, 0, 90)),
        "block_table has",
    ),
    "no pages": (lambda s: replace(s, groups=[]), "0 KV groups"),
    "null block": (
        lambda s: with_group(s, block_table=put(s.groups[0].block_table, 0, 0)),
        "sees block 0",
    ),
    "block beyond the pages": (
        lambda s: with_group(s, block_table=put(s.groups[0].block_table, 0, 77)),
        "sees block 77",
    ),
    "slot beyond the pages": (
        lambda s: with_group(s, slot_mapping=put(s.groups[0].slot_mapping, 1, 10**6)),
        "slot 1000000 of row 1",
    ),
    "pages of another dtype": (
        lambda s: with_group(s, pages=s.groups[0].pages.bfloat16()),
        "pages must be",
    ),
    "pages of other heads": (
        lambda s: with_group(s, pages=s.groups[0].pages[:, :, :, :1].contiguous()),
        "with 2 KV heads of 16",
    ),
    "too few layers": (
        lambda s: with_group(s, pages=s.groups[0].pages[:, :1].contiguous()),
        "takes layer 1",
    ),
    "ranges out of order": (
        lambda s: replace(s, ranges=torch.tensor([[0, 5, 4]], dtype=torch.int32)),
        "range 0",
    ),
    "embeds without rows": (lambda s: replace(s, embeds=torch.zeros(1, 48)), "belong together"),
    "image rows beyond the step": (
        lambda s: replace(s, embeds=torch.zeros(1, 96), image_rows=torch.tensor([4])),
        "image row 4",
    ),
    "too few levels": (
        lambda s: replace(s, embeds=torch.zeros(1, 48), image_rows=torch.tensor([0])),
        "embeds have 1 levels, the program adds 2",
    ),
}


@pytest.fixture(scope="module")
def runner() -> Runner:
    program = llama_program(torch.float32)
    code = (AddEmbedsOp(output=0, level=1), *program.code)
    return new_runner(replace(program, code=code))


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_step_that_does_not_fit_is_refused_and_writes_nothing(name: str, runner: Runner) -> None:
    change, message = WRONG_STEPS[name]
    step = make_step([(3, 30), (1, 1)], torch.float32)
    before = step.groups[0].pages.clone()
    rows = VALUES.rows(4, SIZES.width)
    with pytest.raises(RuntimeError, match=message):
        runner.run(rows, change(step))
    assert torch.equal(step.groups[0].pages, before)
    assert torch.isfinite(runner.run(rows, step)).all()


def test_rows_of_another_width_or_dtype_are_refused(runner: Runner) -> None:
    step = make_step([(4, 4)], torch.float32)
    for rows in (VALUES.rows(4, 47), VALUES.rows(4, SIZES.width).bfloat16(), torch.zeros(4)):
        with pytest.raises(RuntimeError, match="rows must be"):
            runner.run(rows, step)


def test_a_layer_that_is_not_tapped_is_refused(runner: Runner) -> None:
    step = make_step([(4, 4)], torch.float32)
    with pytest.raises(RuntimeError, match="no tap after layer 3"):
        runner.run_tapped(VALUES.rows(4, SIZES.width), step, (1, 3))


def test_an_adapter_of_another_model_is_refused(runner: Runner) -> None:
    places = places_of(llama_program(torch.float32))
    for wrong in ([(8, 8), *places[1:]], places[:2]):
        lora = LoraSegments([(0, 4, VALUES.lora(wrong), 1.0)])
        step = replace(make_step([(4, 4)], torch.float32), lora=lora)
        with pytest.raises(RuntimeError, match=r"the adapter takes 8|there is no leaf 2"):
            runner.run(VALUES.rows(4, SIZES.width), step)


@pytest.mark.parametrize("given", [torch.zeros(4, 3), torch.zeros(4, 64).bfloat16()])
def test_a_module_must_give_what_its_register_takes(given: torch.Tensor) -> None:
    call = CallOp(output=1, input=0, module=lambda _: given, name="layers.1.mlp")
    runner = new_runner(of(call))
    with pytest.raises(InternalError, match=r"layers\.1\.mlp gave"):
        runner.run(torch.zeros(4, SIZES.qkv), make_step([(4, 4)], torch.float32))


def tasks() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def num_threads() -> int:
    return len(tasks())


def test_runners_leave_no_threads_and_no_handles() -> None:
    program = llama_program(torch.float32)
    new_runner(program).close()
    gc.collect()
    handles, threads = torch.ops.plait.program_count(), num_threads()
    for _ in range(5):
        runner = new_runner(program, num_threads=4)
        assert num_threads() == threads + 3
        assert torch.ops.plait.program_count() == handles + 1
        del runner
        gc.collect()
    runner = new_runner(program, num_threads=3)
    runner.close()
    runner.close()
    assert (torch.ops.plait.program_count(), num_threads()) == (handles, threads)
    with pytest.raises(RuntimeError, match="there is no program"):
        runner.run(VALUES.rows(1, SIZES.width), make_step([(1, 1)], torch.float32))


def test_two_threads_cannot_use_one_program_at_once() -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        leave.wait(10)
        return x

    runner = new_runner(of(CallOp(output=1, input=0, module=wait, name="wait"), widths=(4, 4)))
    step = make_step([(1, 1)], torch.float32)
    first = threading.Thread(target=runner.run, args=(torch.zeros(1, 4), step))
    first.start()
    assert inside.wait(10)
    with pytest.raises(InternalError, match="at a step"):
        runner.run(torch.zeros(1, 4), step)
    leave.set()
    first.join()
    assert torch.equal(runner.run(torch.ones(1, 4), step), torch.ones(1, 4))


def test_ops_share_the_threads_of_the_program_that_their_thread_runs() -> None:
    weight, x = VALUES.weight(2048, 512), VALUES.rows(64, 512)
    expected = linear(x, weight)
    runner = new_runner(llama_program(torch.float32), num_threads=3)
    rows, step = VALUES.rows(4, SIZES.width), make_step([(4, 4)], torch.float32)
    hidden = runner.run(rows, step)
    is_same = []

    def compute() -> None:
        with contextlib.suppress(InternalError):  # the program may be at the other's step
            is_same.append(torch.equal(runner.run(rows, step), hidden))
        is_same.extend(torch.equal(linear(x, weight), expected) for _ in range(20))

    others = [threading.Thread(target=compute) for _ in range(3)]
    for other in others:
        other.start()
    compute()
    for other in others:
        other.join()
    runner.close()
    assert all(is_same)
    assert torch.equal(linear(x, weight), expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_of_the_process_runs_without_the_threads() -> None:
    program = llama_program(torch.float32)
    runner = new_runner(program, num_threads=3)
    rows, step = VALUES.rows(4, SIZES.width), make_step([(4, 4)], torch.float32)
    expected = runner.run(rows, step)
    child = os.fork()
    if child == 0:
        is_same = torch.equal(runner.run(rows, step), expected)
        runner.close()
        os._exit(0 if is_same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(runner.run(rows, step), expected)


def test_threads_are_bound_to_the_cores_that_are_named() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    program = llama_program(torch.float32)
    rows, step = VALUES.rows(4, SIZES.width), make_step([(4, 4)], torch.float32)
    found = []

    def run() -> None:
        before = tasks()
        runner = new_runner(program, num_threads=len(cores), pin=cores)
        runner.run(rows, step)
        started = tasks() - before
        found.append(os.sched_getaffinity(0))
        found.extend(os.sched_getaffinity(task) for task in started)
        runner.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [{core} for core in cores]
