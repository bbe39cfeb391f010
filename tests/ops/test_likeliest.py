"""The likeliest token is the same by the kernel and by torch, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from support import cpu_isa

from plait.platform.ops.likeliest import likeliest, linear_likeliest, reference_likeliest
from plait.platform.ops.linear import linear, pack_linear
from plait.platform.ops.quantized_weight import pack_quantized, quantize


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 1023, 1024, 1025, 5000, 49_152])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
def test_kernel_equals_reference(num_rows, num_tokens):
    torch.manual_seed(num_tokens + num_rows)
    # Few different values, so that the largest stands in many places; beyond the width, larger.
    wide = torch.randint(-3, 3, (num_rows, num_tokens + 5)).float()
    wide[:, num_tokens:] = 9
    wide[::3] -= 40
    expected = [int(row[:num_tokens].argmax()) for row in wide]
    assert likeliest(wide, num_tokens) == expected
    assert reference_likeliest(wide, num_tokens) == expected


@pytest.mark.parametrize("place", [0, 17, 1023, 1024, 2999])
def test_a_row_that_is_not_finite_has_none_and_its_neighbours_have_theirs(place):
    torch.manual_seed(place)
    logits = torch.randn(6, 3000)
    whole = likeliest(logits, 3000)
    logits[0, place] = torch.nan
    logits[2, place] = torch.inf
    logits[3] = -torch.inf
    logits[4, torch.arange(3000) != place] = -torch.inf
    logits[5, (torch.arange(3000) + 1) % 3000 == place] = -torch.inf
    logits[5, place] = 100.0
    assert likeliest(logits, 3000) == [-1, whole[1], -1, -1, place, place]
    assert reference_likeliest(logits, 3000) == [-1, whole[1], -1, -1, place, place]
    negative = -torch.rand(1, 3000) - 1
    negative[0, place] = -0.5
    assert likeliest(negative, 3000) == [place]


def test_rows_may_lie_apart():
    logits = torch.randn(5, 200)[:, 3:90]
    assert likeliest(logits, 87) == logits.argmax(1).tolist()


@pytest.mark.parametrize(
    ("logits", "num_tokens", "message"),
    [
        (torch.zeros(8), 8, "logits must"),
        (torch.zeros(2, 8).double(), 8, "float32"),
        (torch.zeros(2, 8), 9, "do not have 9"),
        (torch.zeros(2, 8), 0, "do not have 0"),
        (torch.zeros(8, 2).t(), 8, "dense"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_read(logits, num_tokens, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.plait.likeliest(logits, num_tokens)


def test_the_op_is_registered_soundly():
    logits = torch.randn(3, 70)
    likeliest(logits, 70)  # registers the fake
    torch.library.opcheck(torch.ops.plait.likeliest, (logits, 65))


@pytest.mark.parametrize("activations", ["int8", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_hidden_rows_it_is_that_of_their_logits(activations, dtype):
    torch.manual_seed(1)
    weight, bias = quantize(torch.randn(300, 64), bits=4, group=32), torch.randn(300)
    packed = pack_quantized(weight, activations=activations)
    hidden = torch.randn(9, 64).to(dtype)
    hidden[4] = torch.nan
    for given in (hidden, hidden[:, ::2].repeat(1, 2), hidden[1::2]):
        logits = linear(given, packed, bias, out_dtype=torch.float32)
        assert linear_likeliest(given, packed, bias, 290) == likeliest(logits, 290)
    plain = pack_linear(packed.unpack().to(dtype))
    expected = linear(hidden, plain, out_dtype=torch.float32)[:, :290]
    assert linear_likeliest(hidden, plain, None, 290) == reference_likeliest(expected, 290)
