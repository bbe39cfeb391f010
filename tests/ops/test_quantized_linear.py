import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cpu_isa
from torch import Tensor

from plait.platform.ops import linear as ops
from plait.platform.ops import quantized_linear as quantized
from plait.platform.ops import two_level_scales
from plait.platform.ops.quantized_weight import (
    PackedQuantized,
    Quantized,
    Scales,
    pack_quantized,
    quantize,
)

DTYPES = (torch.float32, torch.bfloat16)
MODES = ("exact", "int8")
KINDS = ("half", "zero", "single", "levels", "zero levels")
ROWS = (0, 1, 2, 3, 4, 5, 8, 9, 33)


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def random_weight(
    generator: torch.Generator, shape: tuple[int, int], *, bits: int, group: int, kind: str
) -> Quantized:
    """Random codes with scales of fp16 (`half`), in two levels (`levels`) or of fp32 (`single`)."""
    out_features, in_features = shape
    groups = -(-in_features // group)
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(out_features, groups, generator=generator) / 2**bits
    mins = -torch.rand(out_features, groups, generator=generator)
    if kind != "single":
        scales, mins = scales.half().float(), mins.half().float()
    if kind in ("levels", "zero levels"):
        scales = two_levels(generator, (out_features, groups), group)
        mins = -two_levels(generator, (out_features, groups), group)
    if kind in ("zero", "zero levels"):
        mins = scales * -(2 ** (bits - 1))
    return Quantized(codes=codes, bits=bits, group=group, scales=scales, mins=mins)


def two_levels(generator: torch.Generator, shape: tuple[int, int], group: int) -> Tensor:
    """Scales as K-quants have them: the greatest number of a block is 63."""
    in_block = max(1, 256 // group)
    blocks = -(-shape[1] // in_block)
    factors = (torch.rand(shape[0], blocks, generator=generator) / 500).half().float()
    numbers = torch.randint(0, 64, shape, generator=generator)
    numbers[:, ::in_block] = 63
    return factors.repeat_interleave(in_block, dim=1)[:, : shape[1]] * numbers


def assert_close(out: Tensor, x: Tensor, packed: PackedQuantized, bias: Tensor | None) -> None:
    """Exact in fp64 over the rows as the op sees them, within the error of one chain in fp32.

    A row group adds a product of whole numbers, exact, and one of its minimum; the scales' product
    and the row's sum are each rounded first.
    """
    rows = x.float()
    if packed.activations == "int8":
        rows = quantized.round_rows(rows, quantized.row_group(packed))
    weight = packed.unpack()
    exact, bound = ops.exact_linear(rows, weight, bias, out.dtype)
    if packed.activations == "int8":
        largest = rows.double().abs() @ weight.double().abs().T
        offsets = rows.double().abs().sum(1, keepdim=True) * weight.double().abs().amax()
        bound = bound + (packed.in_features + 4) * 2.0**-23 * (largest + offsets)
    excess = (out.double() - exact).abs() - bound
    assert out.shape == exact.shape
    assert not (excess > 0).any(), f"beyond the bound by {excess.max().item():.3g}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 96, 128, 5000])
def test_outputs_are_exact_within_the_bound(generator, bits, group, kind, mode):
    for shape in ((70, 200), (16, 64), (33, 1301)):
        weight = random_weight(generator, shape, bits=bits, group=group, kind=kind)
        packed = pack_quantized(weight, activations=mode)
        x = torch.randn(11, shape[1], generator=generator)
        bias = torch.randn(shape[0], generator=generator)
        for rows in (1, 4, 11):
            assert_close(ops.linear(x[:rows], packed, bias), x[:rows], packed, bias)
        half = x.bfloat16()
        assert_close(ops.linear(half, packed), half, packed, None)


@pytest.mark.parametrize(
    ("bits", "zero_point"), [(4, 0), (4, 8), (4, 16), (4, 17), (8, 0), (8, 128), (8, 255)]
)
@pytest.mark.parametrize("group", [16, 32, 64, 5000])
def test_the_greatest_sums_are_exact(bits, zero_point, group):
    """Codes and rows at their ends, where products of sixteen bits would overflow first."""
    sign = torch.tensor([1.0, -1.0]).repeat(80)
    pairs = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(40)
    rows = torch.stack([torch.ones(160), -torch.ones(160), sign, pairs, -pairs])
    last = 2**bits - 1
    codes = torch.stack([torch.zeros(160), torch.full((160,), last), (sign > 0) * last])
    scales = torch.ones(3, -(-160 // group))
    weight = Quantized(
        codes=codes.to(torch.uint8),
        bits=bits,
        group=group,
        scales=scales,
        mins=-zero_point * scales,
    )
    packed = pack_quantized(weight, activations="int8")
    assert (packed.zero_point is None) == (zero_point == 17)
    x = rows * 127
    expected = x @ weight.unpack().T
    for count in (1, 2, 3, 5):
        assert torch.equal(ops.linear(x[:count], packed), expected[:count])
        assert torch.equal(ops.linear(x[count - 1 : count], packed), expected[count - 1 : count])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 80), st.integers(1, 300), st.integers(0, 20)),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([16, 32, 48, 64, 128, 320]),
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_any_shape_is_right(shape, bits, group, kind, mode, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features, rows = shape
    size = (out_features, in_features)
    weight = random_weight(generator, size, bits=bits, group=group, kind=kind)
    packed = pack_quantized(weight, activations=mode)
    assert torch.equal(packed.unpack(), weight.unpack())
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    assert_close(ops.linear(x, packed), x, packed, None)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["half", "zero", "levels", "zero levels"])
def test_exact_rows_have_the_bits_of_the_weight_in_fp32(generator, isa, bits, kind):
    weight = random_weight(generator, (150, 333), bits=bits, group=32, kind=kind)
    packed = pack_quantized(weight, activations="exact")
    wide = ops.pack_linear(weight.unpack())
    x = torch.randn(20, 333, generator=generator)
    for rows in (1, 3, 7, 20):
        assert torch.equal(ops.linear(x[:rows], packed), ops.linear(x[:rows], wide))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(200, 1111), (17, 33), (64, 1600)])
def test_a_row_has_the_same_bits_in_any_batch(generator, shape, bits, mode):
    weight = random_weight(generator, shape, bits=bits, group=32, kind="half")
    packed = pack_quantized(weight, activations=mode)
    x = torch.randn(300, shape[1], generator=generator)
    together = ops.linear(x, packed)
    for rows in ROWS:
        for start in (0, 3, 200):
            some = ops.linear(x[start : start + rows], packed)
            assert torch.equal(some, together[start : start + rows])


@pytest.mark.parametrize("mode", MODES)
def test_a_row_has_the_same_bits_with_any_number_of_threads(generator, mode):
    weight = random_weight(generator, (1000, 576), bits=4, group=32, kind="half")
    packed = pack_quantized(weight, activations=mode)
    x = torch.randn(300, 576, generator=generator)
    before = torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outs.append([ops.linear(x[:rows], packed) for rows in (1, 33, 300)])
    finally:
        torch.set_num_threads(before)
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["half", "zero"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_row_touches_no_other(generator, poison, kind, mode):
    weight = random_weight(generator, (50, 577), bits=4, group=32, kind=kind)
    packed = pack_quantized(weight, activations=mode)
    x = torch.randn(20, 577, generator=generator)
    clean = ops.linear(x, packed)
    x[7, 33] = poison
    out = ops.linear(x, packed)
    hit = out[7].isfinite() if mode == "int8" else out[7].isfinite() & (weight.unpack()[:, 33] != 0)
    assert not hit.any()
    others = [row for row in range(20) if row != 7]
    assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e30])
def test_rows_of_any_size_stay_finite(generator, size):
    weight = random_weight(generator, (20, 64), bits=8, group=32, kind="zero")
    packed = pack_quantized(weight, activations="int8")
    x = torch.randn(3, 64, generator=generator) * size
    assert_close(ops.linear(x, packed), x, packed, None)


@pytest.mark.parametrize("mode", MODES)
def test_rows_may_lie_apart(generator, mode):
    weight = random_weight(generator, (50, 100), bits=4, group=32, kind="half")
    packed = pack_quantized(weight, activations=mode)
    wide = torch.randn(20, 300, generator=generator)
    for x in (wide[:, 7:107], wide[::3, :100], wide[:1, :100].expand(9, 100)):
        assert torch.equal(ops.linear(x, packed), ops.linear(x.contiguous(), packed))
    batch = wide[:, :100].reshape(2, 10, 100)
    assert torch.equal(ops.linear(batch, packed).view(20, 50), ops.linear(wide[:, :100], packed))


@pytest.mark.parametrize("mode", MODES)
def test_output_is_rounded_once(generator, mode):
    weight = random_weight(generator, (50, 100), bits=8, group=32, kind="zero")
    packed = pack_quantized(weight, activations=mode)
    x = torch.randn(9, 100, generator=generator).bfloat16()
    wide = ops.linear(x, packed, out_dtype=torch.float32)
    assert torch.equal(ops.linear(x, packed), wide.bfloat16())


def test_rows_of_the_weight_and_slices_share_its_memory(generator):
    weight = random_weight(generator, (100, 70), bits=4, group=32, kind="half")
    packed = pack_quantized(weight, activations="int8")
    whole = weight.unpack()
    ids = torch.tensor([0, 99, 15, 16, 15])
    assert torch.equal(packed.rows(ids), whole[ids])
    part = packed.slice_outputs(32, 71)
    assert part.blob.untyped_storage().data_ptr() == packed.blob.untyped_storage().data_ptr()
    assert torch.equal(part.unpack(), whole[32:71])
    x = torch.randn(5, 70, generator=generator)
    assert torch.equal(ops.linear(x, part), ops.linear(x, packed)[:, 32:71])
    with pytest.raises(ValueError, match="multiple of 16"):
        packed.slice_outputs(8, 24)


def test_the_smallest_lossless_form_is_chosen(generator):
    forms = {}
    for kind in KINDS:
        weight = random_weight(generator, (20, 512), bits=4, group=32, kind=kind)
        packed = pack_quantized(weight, activations="exact")
        assert torch.equal(packed.unpack(), weight.unpack())
        forms[kind] = (packed.scales, packed.zero_point, packed.num_bytes)
    codes = 16 * 512 // 2
    assert forms == {
        "half": (Scales.FLOAT16, None, 2 * (codes + 16 * 64)),
        "zero": (Scales.FLOAT16, 8, 2 * (codes + 16 * 32)),
        "single": (Scales.FLOAT32, None, 2 * (codes + 16 * 128)),
        "levels": (Scales.TWO_LEVELS, None, 2 * (codes + 2 * 64 + 16 * 32)),
        "zero levels": (Scales.TWO_LEVELS, 8, 2 * (codes + 2 * 32 + 16 * 16)),
    }


@pytest.mark.parametrize("greatest", [63, -128, 15, -32, 127, 5])
def test_two_levels_are_found_whatever_the_greatest_number(generator, greatest):
    factors = torch.randn(40, 3, generator=generator).half().float()
    most = abs(greatest) - 1
    numbers = torch.randint(-most, most + 1, (40, 24), generator=generator)
    numbers[:, 4::8] = greatest
    scales = factors.repeat_interleave(8, dim=1) * numbers
    split = two_level_scales.split_scales(scales, 32)
    assert split is not None
    assert torch.equal(two_level_scales.join_scales(*split, 32), scales)
    scales[39, 23] += 1e-5
    assert two_level_scales.split_scales(scales, 32) is None


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (8, 254)])
@pytest.mark.parametrize("group", [16, 32, 100, 5000])
def test_quantizing_errs_by_half_a_step(generator, bits, steps, group):
    weight = torch.randn(40, 100, generator=generator)
    if group == 100:
        group = 112  # the last group is short
    rounded = quantize(weight, bits=bits, group=group)
    error = (rounded.unpack() - weight).abs()
    step = rounded.scales.repeat_interleave(min(group, 100), dim=1)[:, :100]
    assert (error <= step * 0.501 + 1e-6).all()
    assert (rounded.scales <= 2.01 * weight.abs().max() / steps * (1 if bits == 8 else 1.1)).all()
    packed = pack_quantized(rounded, activations="int8")
    assert packed.scales is Scales.FLOAT16


def test_the_reference_agrees(generator):
    for mode in MODES:
        weight = random_weight(generator, (50, 100), bits=4, group=32, kind="half")
        packed = pack_quantized(weight, activations=mode)
        x = torch.randn(9, 100, generator=generator)
        reference = ops.reference_linear(x, packed, None)
        torch.testing.assert_close(ops.linear(x, packed), reference, rtol=1e-4, atol=1e-4)


def test_refusals_name_the_op(generator):
    weight = random_weight(generator, (20, 64), bits=4, group=32, kind="half")
    packed = pack_quantized(weight, activations="int8")
    with pytest.raises(TypeError, match="linear: x must be float32"):
        ops.linear(torch.ones(1, 64, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match="linear: x is"):
        ops.linear(torch.ones(1, 63), packed)
    with pytest.raises(ValueError, match="exact or int8"):
        pack_quantized(weight, activations="fp8")  # type: ignore[arg-type]
    wrong = Quantized(
        codes=weight.codes + 16, bits=4, group=32, scales=weight.scales, mins=weight.mins
    )
    with pytest.raises(ValueError, match="below 16"):
        pack_quantized(wrong, activations="int8")
    with pytest.raises(ValueError, match="no multiple of 16"):
        pack_quantized(
            Quantized(codes=weight.codes, bits=4, group=24, scales=weight.scales, mins=weight.mins),
            activations="int8",
        )
    with pytest.raises(ValueError, match="not finite"):
        quantize(torch.tensor([[float("nan")]]), bits=8, group=16)
    with pytest.raises(RuntimeError, match="quantized_linear: the packed weight is not"):
        torch.ops.plait.quantized_linear(
            torch.ones(1, 64), packed.blob, 64, 40, 4, 32, 0, -1, False, None, torch.float32
        )


@pytest.mark.parametrize("mode", MODES)
def test_torch_accepts_the_op(generator, mode):
    weight = random_weight(generator, (20, 64), bits=4, group=32, kind="half")
    packed = pack_quantized(weight, activations=mode)
    x = torch.randn(3, 64, generator=generator)
    torch.library.opcheck(
        torch.ops.plait.quantized_linear,
        (x, packed.blob, 64, 20, 4, 32, 0, -1, mode == "exact", None, torch.float32),
    )
