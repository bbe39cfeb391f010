from itertools import combinations

import pytest
import torch
from support import cpu_isa
from torch import Tensor

from plait.platform.ops import lora as ops
from plait.platform.ops.lora import LoraPart, LoraSegments, PlacedLora

DTYPES = (torch.float32, torch.bfloat16)
KINDS = (*DTYPES, torch.int8)  # of weights
RANKS = (1, 2, 3, 7, 8, 15, 16, 17, 64, 65, 128, 256)
NUM_ROWS = 60
OUTPUTS = 77
MERGED = ((0, 33, 5, "plain"), (33, 20, 16, "bias"), (53, 24, 9, "dora"))  # as q, k, v


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def rows(generator: torch.Generator, count: int, size: int, dtype: torch.dtype) -> Tensor:
    """Beside int8 weights, rows are bf16."""
    dtype = torch.bfloat16 if dtype is torch.int8 else dtype
    return torch.randn(count, size, generator=generator).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = torch.int32 if a.dtype is torch.float32 else torch.int16
    return torch.equal(a.view(integers), b.view(integers))


def added(out: Tensor, x: Tensor, segments: LoraSegments, leaf: int = 0) -> Tensor:
    result = out.clone()
    ops.lora_(result, x, segments, leaf)
    return result


def assert_close(result: Tensor, out: Tensor, x: Tensor, segments: LoraSegments, leaf: int) -> None:
    exact, bound = ops.exact_lora(out, x, segments, leaf)
    excess = (result.double() - exact).abs() - bound
    assert not (excess > 0).any(), f"beyond the bound by {excess.max().item():.3g}"


def mixed(adapters: list[PlacedLora]) -> LoraSegments:
    """Long, short, empty and shared runs of rows, and rows without any."""
    first, second, third = adapters
    return LoraSegments(
        [
            (1, 2, first, 1.0),
            (2, 2, first, 1.0),
            (3, 10, second, 0.7),
            (30, 58, first, 1.0),
            (20, 50, third, -1.5),
            (28, 31, second, 2.0),
        ]
    )


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rank", RANKS)
def test_outputs_are_exact_within_the_bound(generator, dtype, rank):
    for in_features in (1, 3, 37, 130):
        shapes = ([(5, 72, rank, "plain")], MERGED, [(0, 77, rank, "dora"), (16, 16, 2, "bias")])
        segments = mixed(
            [ops.example_lora({1: shape}, in_features, dtype, generator) for shape in shapes]
        )
        for x_dtype in DTYPES:
            x = rows(generator, NUM_ROWS, in_features, x_dtype)
            for out_dtype in DTYPES:
                out = rows(generator, NUM_ROWS, OUTPUTS, out_dtype)
                result = added(out, x, segments, 1)
                assert_close(result, out, x, segments, 1)
                ops.reference_lora_(again := out.clone(), x, segments, 1)
                assert_close(again, out, x, segments, 1)


@pytest.mark.parametrize("outputs", [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 200])
def test_every_width_of_outputs_and_number_of_rows(generator, outputs):
    placed = ops.example_lora({0: [(3, outputs, 12, "dora")]}, 50, torch.bfloat16, generator)
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 25):
        x = rows(generator, count + 1, 50, torch.bfloat16)
        out = rows(generator, count + 1, outputs + 5, torch.bfloat16)
        segments = LoraSegments([(0, count, placed, 1.0)])
        assert_close(added(out, x, segments), out, x, segments, 0)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rank", [3, 8, 16, 40])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(generator, dtype, rank):
    shapes = [(0, 40, rank, "plain"), (40, 37, 5, "dora")]
    placed = ops.example_lora({0: shapes}, 101, dtype, generator)
    other = ops.example_lora({0: MERGED}, 101, dtype, generator)
    x = rows(generator, NUM_ROWS, 101, dtype)
    out = rows(generator, NUM_ROWS, OUTPUTS, dtype)
    together = added(out, x, LoraSegments([(0, NUM_ROWS, placed, 0.3)]))

    for row in range(NUM_ROWS):
        one = slice(row, row + 1)
        alone = added(out[one], x[one], LoraSegments([(0, 1, placed, 0.3)]))
        assert same_bits(alone, together[one])
    for cut in (1, 5, 6, 7, 29):
        halves = LoraSegments([(0, cut, placed, 0.3), (cut, NUM_ROWS, placed, 0.3)])
        assert same_bits(added(out, x, halves), together)
    order = torch.randperm(NUM_ROWS, generator=generator)
    shuffled = added(out[order], x[order], LoraSegments([(0, NUM_ROWS, placed, 0.3)]))
    assert same_bits(shuffled, together[order])
    neighbours = LoraSegments([(0, 20, other, 1.0), (20, 33, placed, 0.3), (33, 60, other, 2.0)])
    assert same_bits(added(out, x, neighbours)[20:33], together[20:33])


@pytest.mark.parametrize("dtype", KINDS)
def test_threads_change_no_bits(generator, dtype):
    adapters = [ops.example_lora({0: MERGED}, 900, dtype, generator) for _ in range(3)]
    x = rows(generator, NUM_ROWS, 900, dtype)
    out = rows(generator, NUM_ROWS, OUTPUTS, dtype)
    segments = mixed(adapters)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(added(out, x, segments))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[1], results[0])
    assert same_bits(results[2], results[0])


@pytest.mark.parametrize("dtype", KINDS)
def test_other_rows_and_outputs_keep_their_bits(generator, dtype):
    shapes = [(3, 30, 4, "plain"), (50, 11, 4, "dora")]
    adapters = [ops.example_lora({0: shapes}, 20, dtype, generator) for _ in range(3)]
    segments = mixed(adapters)
    x = rows(generator, NUM_ROWS, 20, dtype)
    out = rows(generator, NUM_ROWS, OUTPUTS, dtype)
    held = torch.ones_like(out, dtype=torch.bool)
    for start, end, _, _ in segments.entries:
        held[start:end, 3:33] = held[start:end, 50:61] = False
    out[held] = float("nan")
    out[-1] = -0.0
    result = added(out, x, segments)
    assert same_bits(result[held], out[held])
    assert (result != out)[~held].float().mean() > 0.9


def test_rows_without_adapters_are_not_even_read(generator):
    placed = ops.example_lora({0: MERGED}, 20, torch.float32, generator)
    x = rows(generator, 9, 20, torch.float32)
    out = rows(generator, 9, OUTPUTS, torch.float32)
    segments = LoraSegments([(2, 8, placed, 1.0)])
    clean = added(out, x, segments)
    x[[0, 1, 5, 8]] = float("nan")
    poisoned = added(out, x, segments)
    assert not poisoned[5].isfinite().any()
    others = [0, 1, 2, 3, 4, 6, 7, 8]
    assert same_bits(poisoned[others], clean[others])


@pytest.mark.parametrize("dtype", KINDS)
def test_adapters_of_one_row_are_applied_one_after_the_other(generator, dtype):
    adapters = [ops.example_lora({0: MERGED}, 64, dtype, generator) for _ in range(3)]
    x = rows(generator, NUM_ROWS, 64, dtype)
    out = rows(generator, NUM_ROWS, OUTPUTS, dtype)
    segments = mixed(adapters)
    expected = out
    for entry in segments.entries:
        expected = added(expected, x, LoraSegments([entry]))
    assert same_bits(added(out, x, segments), expected)


def test_adapters_change_only_their_own_leaves(generator):
    placed = ops.example_lora({2: [(0, 8, 2, "plain")]}, 6, torch.float32, generator)
    other = ops.example_lora({3: MERGED, 4: []}, 6, torch.float32, generator)
    longer = ops.pack_lora({2: placed.unpack(2)}, 5, torch.float32)
    segments = LoraSegments([(0, 2, longer, 1.0), (2, 4, other, 1.0)])
    x, out = rows(generator, 4, 6, torch.float32), rows(generator, 4, OUTPUTS, torch.float32)
    assert [leaf for leaf in range(5) if segments.changes(leaf)] == [2, 3]
    for leaf in (0, 4):
        assert same_bits(added(out, x, segments, leaf), out)
    assert same_bits(added(out, x, segments, 2)[2:], out[2:])
    assert same_bits(added(out, x, segments, 3)[:2], out[:2])
    assert not LoraSegments([])
    assert same_bits(added(out, x, LoraSegments([(1, 1, longer, 1.0)]), 2), out)


@pytest.mark.parametrize("dtype", KINDS)
def test_rows_may_lie_apart(generator, dtype):
    placed = ops.example_lora({0: MERGED}, 30, dtype, generator)
    segments = LoraSegments([(0, 8, placed, 1.0), (9, 10, placed, 1.0)])
    wide_x, wide_out = rows(generator, 20, 50, dtype), rows(generator, 20, 100, dtype)
    x, out = wide_x[::2, 7:37], wide_out[::2, 11:88]
    expected = added(out.contiguous(), x.contiguous(), segments)
    before = wide_out.clone()
    ops.lora_(out, x, segments, 0)
    assert same_bits(out.contiguous(), expected)
    assert same_bits(wide_out[1::2], before[1::2])
    assert same_bits(wide_out[:, 88:].contiguous(), before[:, 88:].contiguous())
    one = x[:1].expand(10, 30)
    assert same_bits(added(expected, one, segments), added(expected, one.contiguous(), segments))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rank", [1, 8, 21])
def test_an_embedding_takes_columns_by_token(generator, dtype, rank):
    placed = ops.example_lora({0: [(0, 50, rank, "plain")]}, 99, dtype, generator)
    segments = LoraSegments([(2, 9, placed, 1.0), (9, 10, placed, 0.5)])
    token_ids = torch.tensor([-1, 7777, 0, 98, 5, 5, 41, 16, 17, 98, 123])
    out = rows(generator, 11, 50, dtype)
    one_hot = torch.zeros(11, 99, dtype=torch.float64)
    one_hot[torch.arange(2, 10), token_ids[2:10]] = 1
    result, reference = out.clone(), out.clone()
    ops.lora_embedding_(result, token_ids, segments, 0)
    ops.reference_lora_embedding_(reference, token_ids, segments, 0)
    assert_close(result, out, one_hot, segments, 0)
    assert_close(reference, out, one_hot, segments, 0)
    assert same_bits(result[[0, 1, 10]], out[[0, 1, 10]])
    for add in (ops.lora_embedding_, ops.reference_lora_embedding_):
        with pytest.raises((RuntimeError, ValueError), match="not one of the 99"):
            add(result, torch.full((11,), 99), segments, 0)


@pytest.mark.parametrize("rank", RANKS)
def test_codes_are_half_a_step_from_the_weights_at_most(generator, rank):
    a, b = torch.randn(rank, 35, generator=generator), torch.randn(41, rank, generator=generator)
    a[0] = 0
    a[-1], b[:, -1] = a[-1] * 1e-4, b[:, -1] * 1e3  # each row and column has its own scale
    parts = {0: [LoraPart(a=a, b=b, scale=2.0), LoraPart(a=-a, b=-b, scale=2.0, start=41)]}
    placed = ops.pack_lora(parts, 1, torch.int8)
    even = rank + rank % 2
    needed = 2 * rank * (4 + 36) + 2 * even * 41
    assert needed <= placed.num_bytes <= needed + 64 + 2 * 3
    assert placed.num_bytes == ops.lora_bytes(parts, torch.int8)
    for part, sign in zip(placed.unpack(0), (1, -1), strict=True):
        assert part.a.shape == a.shape
        assert part.b.shape == b.shape
        a_step, b_step = a.abs().amax(dim=1).double() / 127, b.abs().amax(dim=0).double() / 127
        assert torch.equal(part.a, part.a.round())
        assert int(part.a.abs().max()) == 127 or rank == 1
        assert not part.a[0].any()
        assert ((part.a * a_step[:, None] - sign * a).abs() <= 0.5001 * a_step[:, None]).all()
        now = part.b[:, 1:] / a_step[1:]
        assert ((now - sign * b[:, 1:]).abs() <= 0.5001 * b_step[1:]).all()


def test_what_is_not_finite_stays_so_beside_codes(generator):
    placed = ops.example_lora({0: MERGED}, 300, torch.int8, generator)
    x, out = rows(generator, 8, 300, torch.float32), rows(generator, 8, OUTPUTS, torch.float32)
    segments = LoraSegments([(0, 7, placed, 1.0)])
    clean = added(out, x, segments)
    for value in (float("nan"), float("inf"), -float("inf")):
        x[3, 299] = value
        poisoned = added(out, x, segments)
        assert not poisoned[3].isfinite().any()
        others = [0, 1, 2, 4, 5, 6, 7]
        assert same_bits(poisoned[others], clean[others])
    x[3] = 0
    x[4] = 1e-38
    assert added(out, x, segments)[3:5].isfinite().all()


@pytest.mark.parametrize("rank", [255, 256, 257, 600])
@pytest.mark.parametrize("in_features", [255, 256, 257, 1025, 2100])
def test_codes_have_groups_of_inputs_and_ranks(generator, rank, in_features):
    placed = ops.example_lora({0: [(2, 33, rank, "plain")]}, in_features, torch.int8, generator)
    x, out = rows(generator, 8, in_features, torch.float32), rows(generator, 8, 40, torch.float32)
    x[:, ::7] *= 100
    segments = LoraSegments([(0, 1, placed, 1.0), (1, 8, placed, 0.5)])
    together = added(out, x, segments)
    assert_close(together, out, x, segments, 0)
    alone = added(out[5:6], x[5:6], LoraSegments([(0, 1, placed, 0.5)]))
    assert same_bits(alone, together[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", RANKS)
def test_ranks_are_packed_without_padding(generator, dtype, rank):
    a, b = rows(generator, rank, 35, dtype), rows(generator, 41, rank, dtype)
    vector = torch.randn(41, generator=generator)
    parts = {
        3: [LoraPart(a=a, b=b, scale=2.0), LoraPart(a=-a, b=-b, scale=0.1, start=41, g=vector)],
        1: [LoraPart(a=a.T.contiguous().T, b=b.T.contiguous().T, scale=1.0, b_bias=vector)],
    }
    placed = ops.pack_lora(parts, 5, dtype)
    needed = 3 * rank * (35 + 41) * dtype.itemsize + 2 * 41 * 4
    assert needed <= placed.num_bytes <= needed + 64 + 2 * 6
    assert placed.num_bytes == ops.lora_bytes(parts, dtype)
    shapes = LoraPart(a=a.to("meta"), b=b.to("meta"), scale=1.0)
    assert ops.lora_bytes({0: [shapes]}, dtype) <= rank * (35 + 41) * dtype.itemsize + 70
    for leaf, expected in parts.items():
        for part, was in zip(placed.unpack(leaf), expected, strict=True):
            assert torch.equal(part.a, was.a)
            assert torch.equal(part.b, was.b)
            assert (part.scale, part.start) == (was.scale, was.start)
            for now, before in zip(part.vectors(), was.vectors(), strict=True):
                assert (now is None) == (before is None)
                assert now is None or torch.equal(now, before)


def test_adapters_of_one_shape_share_their_table(generator):
    def packed(rank: int) -> PlacedLora:
        part = LoraPart(
            a=rows(generator, rank, 35, torch.float32), b=torch.ones(41, rank), scale=2.0
        )
        return ops.pack_lora({3: [part]}, 5, torch.bfloat16)

    first, second, other = packed(4), packed(4), packed(5)
    assert first.table is second.table
    assert first.buffer.data_ptr() != second.buffer.data_ptr()
    assert other.table is not first.table
    assert other.unpack(3)[0].rank == 5


def test_large_adapters_do_not_begin_at_addresses_that_share_a_cache_set():
    part = LoraPart(a=torch.ones(64, 40_000), b=torch.ones(30_000, 64), scale=1.0)
    placed = [ops.pack_lora({0: [part]}, 1, torch.bfloat16) for _ in range(4)]
    begins = [one.buffer.data_ptr() % (64 << 10) for one in placed]
    apart = [min((a - b) % (64 << 10), (b - a) % (64 << 10)) for a, b in combinations(begins, 2)]
    assert min(apart) >= 8 << 10
    assert all(begin % 64 == 0 for begin in begins)


def test_refusals_name_what_does_not_fit(generator):
    placed = ops.example_lora({0: MERGED}, 20, torch.float32, generator)
    x, out = torch.zeros(4, 20), torch.zeros(4, OUTPUTS)
    three, four, five = (LoraSegments([(0, end, placed, 1.0)]) for end in (3, 4, 5))
    for add in (ops.lora_, ops.reference_lora_):
        for bad_out, bad_x, segments, message in (
            (out, x, five, "out has 4 rows"),
            (out, x[:3], four, "the input 3"),
            (out, x[:, :19], four, "x has 19 columns, the adapter takes 20"),
            (out[:, :76], x, four, "are not inside the leaf's 76"),
        ):
            with pytest.raises((RuntimeError, ValueError), match=message):
                add(bad_out, bad_x, segments, 0)
    with pytest.raises(RuntimeError, match="must be float32 or bfloat16"):
        ops.lora_(out.double(), x, four, 0)
    with pytest.raises(RuntimeError, match="rows of out must not overlap"):
        ops.lora_(out[:1].expand(4, OUTPUTS), x, four, 0)
    with pytest.raises(RuntimeError, match="not in the order of rows"):
        torch.ops.plait.lora_(out, x, torch.cat([four.table, three.table]), 0)
    with pytest.raises(ValueError, match="end after it begins"):
        LoraSegments([(3, 2, placed, 1.0)])
    a, b = torch.ones(2, 20), torch.ones(5, 2)
    for part, message in (
        (LoraPart(a=a, b=b[:, :1], scale=1.0), r"b \[N, r\]"),
        (LoraPart(a=a, b=b, scale=1.0, g=torch.ones(4)), r"must be \[5\]"),
        (LoraPart(a=a, b=b, scale=1.0, bias=torch.ones(5)), "a bias without g"),
        (LoraPart(a=a, b=b, scale=1.0, start=-1), "a negative start"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.pack_lora({0: [part]}, 1, torch.float32)
    part = LoraPart(a=a, b=b, scale=1.0)
    with pytest.raises(ValueError, match="different inputs"):
        ops.pack_lora({0: [part, LoraPart(a=a[:, :3], b=b, scale=1.0)]}, 1, torch.float32)
    with pytest.raises(ValueError, match="in 0 to 1"):
        ops.pack_lora({2: [part]}, 2, torch.float32)
    with pytest.raises(TypeError, match=r"not torch\.float16"):
        ops.lora_bytes({0: [part]}, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_accepts_the_ops(generator, dtype):
    placed = ops.example_lora({0: [(0, 10, 3, "plain")]}, 20, dtype, generator)
    segments = LoraSegments([(0, 2, placed, 1.0)])
    out = rows(generator, 3, 10, dtype)
    ops.lora_(out, rows(generator, 3, 20, dtype), segments, 0)
    torch.library.opcheck(
        torch.ops.plait.lora_, (out, rows(generator, 3, 20, dtype), segments.table, 0)
    )
    torch.library.opcheck(
        torch.ops.plait.lora_embedding_, (out, torch.tensor([1, 2, 3]), segments.table, 0)
    )
