"""Layer norm: near torch's, the same alone and together, on every instruction set."""

import pytest
import torch
from support import cpu_isa

from plait.platform.ops.layer_norm import layer_norm, reference_layer_norm


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 33, 64, 100, 576])
def test_rows_are_near_torch_and_the_same_alone(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = (torch.randn(5, size, generator=generator) + 3).to(dtype)
    weight, bias = torch.randn(2, size, generator=generator).to(dtype)
    for w, b in ((weight, bias), (weight, None), (None, None)):
        out = layer_norm(x, w, b, 1e-5)
        expected = reference_layer_norm(x, w, b, 1e-5)
        tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-5
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        alone = torch.cat([layer_norm(row[None], w, b, 1e-5) for row in x])
        assert torch.equal(out, alone)


def test_rows_and_vectors_must_fit() -> None:
    with pytest.raises(ValueError, match="the bias"):
        layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(3), 1e-5)
