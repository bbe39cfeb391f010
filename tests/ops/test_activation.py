import pytest
import torch
from support import cpu_isa

from plait.platform.ops import activation as ops

DTYPES = (torch.float32, torch.bfloat16)
NAMES = ("silu", "gelu_tanh", "gelu", "quick_gelu")


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 3, 16), (7, 33), (40, 4304)])
def test_values_are_those_of_torch_in_fp64(name, dtype, shape):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 4).to(dtype)
    out = ops.activation(x, name)
    assert out.dtype is dtype
    rtol = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
    # Where gelu is near 0 its error is absolute: that of erf, times the value.
    atol = 4e-6 if name == "gelu" else 1e-6
    exact = ops._REFERENCES[name](x.double())
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * rtol, atol=atol)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_of_value_is_right(name):
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.logspace(-30, 30, 61)])
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, float("inf"), float("nan")])])
    exact = ops._REFERENCES[name](x.double())
    out = ops.activation(x, name).double()
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_value_has_the_same_bits_wherever_it_stands(name, dtype):
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = ops.activation(x, name)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(ops.activation(x, name), together)
    finally:
        torch.set_num_threads(before)
    for start, end in ((0, 1), (5, 22), (99_990, 100_003)):
        assert torch.equal(ops.activation(x[start:end], name), together[start:end])


def test_a_tensor_that_is_not_dense_is_taken():
    x = torch.randn(12, 100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.activation(x.T, "gelu"), ops.activation(x, "gelu").T)


def test_refusals_name_the_op():
    with pytest.raises(ValueError, match="activation: no such activation as relu"):
        ops.activation(torch.ones(4), "relu")


def test_torch_accepts_the_op():
    torch.library.opcheck(torch.ops.plait.activation, (torch.randn(3, 20), "silu"))
