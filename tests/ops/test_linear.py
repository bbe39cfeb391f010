import pytest
import torch
from support import cpu_isa
from torch import Tensor

from plait.platform.ops import linear as ops

DTYPES = (torch.float32, torch.bfloat16)
ROWS = (0, 1, 2, 5, 6, 7, 13, 33, 200)


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


def test_the_library_is_built():
    assert ops.has_kernels()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def layer(
    generator: torch.Generator, shape: tuple[int, int], dtype: torch.dtype, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    out_features, in_features = shape
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    return weight, bias, torch.randn(rows, in_features, generator=generator).to(dtype)


def assert_close(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact, bound = ops.exact_linear(x, weight, bias, out.dtype)
    assert out.shape == exact.shape
    excess = (out.double() - exact).abs() - bound
    assert not (excess > 0).any(), f"beyond the bound by {excess.max().item():.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_features", [1, 7, 15, 16, 17, 576, 1111])
@pytest.mark.parametrize("out_features", [0, 1, 15, 16, 17, 47, 64, 200])
def test_outputs_are_exact_within_the_bound(generator, dtype, in_features, out_features):
    weight, bias, x = layer(generator, (out_features, in_features), dtype, 33)
    packed = ops.pack_linear(weight)
    for rows in (0, 1, 2, 5, 33):
        assert_close(ops.linear(x[:rows], packed), x[:rows], weight, None)
        assert_close(ops.linear(x[:rows], packed, bias), x[:rows], weight, bias)
    assert_close(ops.linear(x, packed, bias, out_dtype=torch.float32), x, weight, bias)


def test_a_head_of_many_outputs(generator):
    weight, bias, x = layer(generator, (49_153, 64), torch.bfloat16, 3)
    out = ops.linear(x, ops.pack_linear(weight), bias, out_dtype=torch.float32)
    assert_close(out, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(200, 1111), (64, 576), (17, 33)])
def test_a_row_has_the_same_bits_in_any_batch(generator, dtype, shape):
    weight, bias, x = layer(generator, shape, dtype, 400)
    packed = ops.pack_linear(weight)
    together = ops.linear(x, packed, bias, out_dtype=torch.float32)
    for rows in ROWS:
        for start in (0, 3, 200):
            some = ops.linear(x[start : start + rows], packed, bias, out_dtype=torch.float32)
            assert torch.equal(some, together[start : start + rows])
    assert torch.equal(
        ops.linear(x.flip(0), packed, bias, out_dtype=torch.float32).flip(0), together
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_with_any_number_of_threads(generator, dtype):
    weight, bias, x = layer(generator, (1000, 576), dtype, 400)
    packed = ops.pack_linear(weight)
    before = torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            outs.append([ops.linear(x[:rows], packed, bias) for rows in (1, 33, 400)])
    finally:
        torch.set_num_threads(before)
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_row_touches_no_other(generator, dtype, poison):
    weight, bias, x = layer(generator, (50, 577), dtype, 20)
    packed = ops.pack_linear(weight)
    clean = ops.linear(x, packed, bias)
    x[7] = poison
    out = ops.linear(x, packed, bias)
    assert not out[7].isfinite().any()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(generator, dtype):
    weight, bias, wide = layer(generator, (50, 300), dtype, 20)
    packed = ops.pack_linear(weight[:, :100])
    for x in (wide[:, 7:107], wide[::3, :100], wide.T[:100].T, wide[:1, :100].expand(9, 100)):
        expected = ops.linear(x.contiguous(), packed, bias)
        assert torch.equal(ops.linear(x, packed, bias), expected)
    transposed = wide[:, :100].T.contiguous().T
    assert torch.equal(ops.linear(transposed, packed), ops.linear(wide[:, :100], packed))
    batch = wide[:, :100].view(2, 10, 100)
    assert torch.equal(ops.linear(batch, packed).view(20, 50), ops.linear(wide[:, :100], packed))


def test_bias_may_be_wider_than_the_rows(generator):
    weight, _, x = layer(generator, (50, 100), torch.bfloat16, 4)
    bias = torch.randn(50, generator=generator)
    assert_close(ops.linear(x, ops.pack_linear(weight), bias), x, weight, bias)


def test_output_is_rounded_once(generator):
    weight, bias, x = layer(generator, (50, 100), torch.bfloat16, 9)
    packed = ops.pack_linear(weight)
    wide = ops.linear(x, packed, bias, out_dtype=torch.float32)
    assert torch.equal(ops.linear(x, packed, bias), wide.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (64, 576)])
def test_unpacking_gives_the_weight_back(generator, dtype, shape):
    weight, _, _ = layer(generator, shape, dtype, 0)
    assert torch.equal(ops.pack_linear(weight).unpack(), weight)
    assert torch.equal(ops.pack_linear(weight.T.contiguous().T).unpack(), weight)


def test_a_slice_shares_memory_and_bits(generator):
    weight, _, x = layer(generator, (100, 33), torch.float32, 5)
    packed = ops.pack_linear(weight)
    part = packed.slice_outputs(32, 71)
    assert part.tiles.untyped_storage().data_ptr() == packed.tiles.untyped_storage().data_ptr()
    assert torch.equal(part.unpack(), weight[32:71])
    assert torch.equal(ops.linear(x, part), ops.linear(x, packed)[:, 32:71])
    with pytest.raises(ValueError, match="multiple of 16"):
        packed.slice_outputs(8, 24)
    with pytest.raises(ValueError, match="not inside"):
        packed.slice_outputs(96, 101)


def test_the_reference_agrees(generator):
    weight, bias, x = layer(generator, (50, 100), torch.bfloat16, 9)
    reference = ops.reference_linear(x, ops.pack_linear(weight), bias)
    assert_close(reference, x, weight, bias)


def test_refusals_name_the_op(generator):
    packed = ops.pack_linear(torch.ones(4, 3))
    with pytest.raises(TypeError, match="linear: x is torch"):
        ops.linear(torch.ones(1, 3, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="linear: x is"):
        ops.linear(torch.ones(1, 4), packed)
    with pytest.raises(ValueError, match="linear: the bias"):
        ops.linear(torch.ones(1, 3), packed, torch.ones(3))
    with pytest.raises(TypeError, match="linear: weights must be"):
        ops.pack_linear(torch.ones(4, 3, dtype=torch.float16))
    with pytest.raises(ValueError, match="K > 0"):
        ops.pack_linear(torch.ones(4, 0))
    with pytest.raises(RuntimeError, match="linear: bias must be float32 or bfloat16"):
        ops.linear(torch.ones(1, 3), packed, torch.ones(4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="linear: the packed weight is not"):
        torch.ops.plait.linear(torch.ones(1, 3), packed.tiles, 3, 40, None, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_accepts_the_op(generator, dtype):
    weight, bias, x = layer(generator, (20, 10), dtype, 3)
    packed = ops.pack_linear(weight)
    torch.library.opcheck(torch.ops.plait.linear, (x, packed.tiles, 10, 20, bias, torch.float32))
