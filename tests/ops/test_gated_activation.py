import pytest
import torch
from support import cpu_isa

from plait.platform.ops import gated_activation as ops

DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5, 8, 16, 17, 33, 1536])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_values_are_those_of_torch_in_fp64(activation, dtype, size, num_rows):
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(num_rows, 2 * size, generator=generator) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    exact = ops._REFERENCES[activation](gate) * up
    out = ops.gated_activation(x, activation)
    assert out.dtype is dtype
    rtol = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
    # Where gelu is near 0 its error is absolute: that of erf, times gate and up.
    atol = 2e-5 if activation == "gelu" else 1e-6
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * rtol, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_size_of_gate_is_right(activation):
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.logspace(-30, 30, 61)])
    gate = torch.cat([gate, -gate, torch.tensor([0.0, -0.0, float("inf"), float("nan")])])
    x = torch.cat([gate, torch.ones_like(gate)]).unsqueeze(0)
    out = ops.gated_activation(x, activation)[0]
    exact = ops._REFERENCES[activation](gate.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(dtype):
    x = torch.randn(400, 2 * 333, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = ops.gated_activation(x, "silu")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(ops.gated_activation(x, "silu"), together)
    finally:
        torch.set_num_threads(before)
    for count in (1, 2, 5, 33):
        assert torch.equal(ops.gated_activation(x[7 : 7 + count], "silu"), together[7 : 7 + count])


def test_rows_may_lie_apart_and_have_more_dimensions():
    wide = torch.randn(12, 100, generator=torch.Generator().manual_seed(1))
    expected = ops.gated_activation(wide[:, 10:50].contiguous(), "silu")
    assert torch.equal(ops.gated_activation(wide[:, 10:50], "silu"), expected)
    assert torch.equal(ops.gated_activation(wide.T[10:50].T, "silu"), expected)
    assert torch.equal(
        ops.gated_activation(wide.view(3, 4, 100)[..., 10:50], "silu").view(12, 20), expected
    )


def test_refusals_name_the_op():
    with pytest.raises(ValueError, match="gated_activation: no such activation as relu"):
        ops.gated_activation(torch.ones(1, 4), "relu")
    with pytest.raises(ValueError, match="gated_activation: rows of 5"):
        ops.gated_activation(torch.ones(1, 5), "silu")
    with pytest.raises(RuntimeError, match="gated_activation: x must be float32 or bfloat16"):
        ops.gated_activation(torch.ones(1, 4, dtype=torch.float64), "silu")


def test_torch_accepts_the_op():
    torch.library.opcheck(torch.ops.plait.gated_activation, (torch.randn(3, 20), "silu"))
