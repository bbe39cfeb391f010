"""Activations have the same bits wherever in a tensor a value stands."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from plait.platform.model.elementwise import EvenActivation, replace_activations


@pytest.fixture
def three_threads():
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"])
@pytest.mark.parametrize("size", [17, 48, 4304])
def test_a_row_has_the_same_bits_alone_and_among_others(name, dtype, size):
    activation = EvenActivation(ACT2FN[name])
    rows = (3 * torch.randn(101, size, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = activation(rows)
    torch.testing.assert_close(whole, ACT2FN[name](rows.float()).to(dtype))
    for start, end in ((0, 1), (1, 40), (40, 101)):
        assert torch.equal(activation(rows[start:end]), whole[start:end])


def test_only_activations_are_replaced():
    part = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Sequential(nn.SiLU()), nn.LayerNorm(4))
    replace_activations(part)
    kinds = [type(module).__name__ for module in part.modules()]
    assert kinds.count("EvenActivation") == 2
    replace_activations(part)  # once is enough
    assert [type(module).__name__ for module in part.modules()] == kinds
