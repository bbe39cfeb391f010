import pytest
import torch
from support import cpu_isa
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from plait.platform.ops import rms_norm as ops

DTYPES = (torch.float32, torch.bfloat16)
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


def rows(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    return x, torch.randn(shape[-1], generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 7, 16, 17, 33, 64, 65, 576])
def test_rows_are_exact_within_a_few_units(dtype, size):
    x, weight = rows((9, size), dtype)
    wide = x.double()
    for offset in (0.0, 1.0):
        exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        exact = exact * (weight.double() + offset)
        out = ops.rms_norm(x, weight, 1e-5, weight_offset=offset, round_first=False)
        assert out.dtype is dtype
        # fp32: the sum of squares errs by size / 16 units at most, halved by the root.
        unit = 2.0**-8 if dtype is torch.bfloat16 else (size / 32 + 4) * 2.0**-24
        torch.testing.assert_close(out.double(), exact, rtol=1.01 * unit, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("norm_class", "options"),
    [
        (LlamaRMSNorm, {}),
        (GemmaRMSNorm, {"weight_offset": 1.0}),
        (Olmo2RMSNorm, {"round_first": False}),
    ],
)
def test_transformers_gives_the_same(dtype, norm_class, options):
    x, weight = rows((50, 576), dtype)
    norm = norm_class(576, eps=1e-6).to(dtype)
    norm.weight.data = weight
    expected = norm(x).detach()
    out = ops.rms_norm(x, weight, 1e-6, **options)
    if dtype is torch.bfloat16:  # a value on the border of two may round to the other one
        assert (out != expected).float().mean() < 0.01
    torch.testing.assert_close(out, expected, rtol=4 * UNIT[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(dtype):
    x, weight = rows((500, 577), dtype)
    together = ops.rms_norm(x, weight, 1e-6)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(ops.rms_norm(x, weight, 1e-6), together)
    finally:
        torch.set_num_threads(before)
    for count in (0, 1, 2, 5, 33):
        assert torch.equal(ops.rms_norm(x[7 : 7 + count], weight, 1e-6), together[7 : 7 + count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_merged_projection_need_no_copy(dtype):
    merged, _ = rows((6, 10 * 24), dtype)
    weight = merged[0, :24].clone()
    heads = merged.view(6, 10, 24)[:, 3:7]
    expected = ops.rms_norm(heads.contiguous().view(24, 24), weight, 1e-6).view(6, 4, 24)
    assert torch.equal(ops.rms_norm(heads, weight, 1e-6), expected)
    assert torch.equal(ops.rms_norm(heads.unsqueeze(0), weight, 1e-6), expected.unsqueeze(0))
    assert torch.equal(ops.rms_norm(heads[2, 1], weight, 1e-6), expected[2, 1])
    across = heads.transpose(0, 1)
    assert torch.equal(ops.rms_norm(across, weight, 1e-6), expected.transpose(0, 1))
    scattered = heads.contiguous().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(ops.rms_norm(scattered, weight, 1e-6), expected)


def test_a_poisoned_row_touches_no_other():
    x, weight = rows((5, 100), torch.float32)
    clean = ops.rms_norm(x, weight, 1e-6)
    x[2, 50] = float("nan")
    out = ops.rms_norm(x, weight, 1e-6)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_rows_of_zeros_and_of_huge_values_stay_finite():
    weight = torch.ones(64)
    assert torch.equal(ops.rms_norm(torch.zeros(2, 64), weight, 1e-6), torch.zeros(2, 64))
    huge = torch.full((1, 64), 1e18)
    torch.testing.assert_close(ops.rms_norm(huge, weight, 1e-6), torch.ones(1, 64))


def test_weights_may_be_wider_than_the_rows():
    x, _ = rows((5, 100), torch.bfloat16)
    weight = torch.randn(100)
    expected = ops.reference_rms_norm(x, weight, 1e-6)
    out = ops.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out, expected, rtol=2 * UNIT[torch.bfloat16], atol=1e-6)


def test_refusals_name_the_op():
    with pytest.raises(ValueError, match="rms_norm: x is"):
        ops.rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6)
    with pytest.raises(RuntimeError, match="rms_norm: x must be float32 or bfloat16"):
        ops.rms_norm(torch.ones(2, 4, dtype=torch.float64), torch.ones(4), 1e-6)


def test_torch_accepts_the_op():
    x, weight = rows((3, 4, 10), torch.bfloat16)
    torch.library.opcheck(torch.ops.plait.rms_norm, (x, weight, 1e-6, 0.0, True))
