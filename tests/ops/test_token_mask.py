"""Rows of bits decide alike in the kernel and in torch, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from support import cpu_isa

from plait.platform.ops.token_mask import example_token_mask, reference_token_mask_, token_mask_


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000, 49_152])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
def test_kernel_equals_reference_bit_for_bit(num_rows, vocab_size):
    torch.manual_seed(vocab_size + num_rows)
    logits, mask, rows = example_token_mask(num_rows, vocab_size, 5)
    logits[:, ::7] = float("nan")
    expected = logits.clone()
    reference_token_mask_(expected, mask, rows)
    token_mask_(logits, mask, rows)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


def test_each_bit_stands_for_its_token():
    mask = torch.zeros(70, 3, dtype=torch.int32)
    for token in range(70):
        word = 1 << token % 32
        mask[token, token // 32] = word - (1 << 32) if word >> 31 else word
    logits = torch.zeros(70, 70)
    token_mask_(logits, mask, torch.arange(70, dtype=torch.int32))
    assert torch.equal(logits == 0, torch.eye(70, dtype=torch.bool))


def test_rows_without_a_mask_and_what_lies_between_rows_stay():
    wide = torch.zeros(4, 100)
    rows = torch.tensor([0, -1, 0, -1], dtype=torch.int32)
    token_mask_(wide[:, :64], torch.zeros(1, 2, dtype=torch.int32), rows)
    assert torch.equal(wide[:, 64:], torch.zeros(4, 36))
    assert torch.equal(wide[1::2], torch.zeros(2, 100))
    assert bool((wide[::2, :64] == float("-inf")).all())


@pytest.mark.parametrize(
    ("logits", "mask", "rows", "message"),
    [
        (torch.zeros(2, 33), torch.zeros(1, 1, dtype=torch.int32), [0, 0], "do not cover"),
        (torch.zeros(2, 8), torch.zeros(1, 1, dtype=torch.int32), [0, 1], "mask row 1 of 1"),
        (torch.zeros(2, 8), torch.zeros(1, 1, dtype=torch.int32), [0], "mask_rows must"),
        (torch.zeros(2, 8), torch.zeros(1, 1), [0, 0], "mask must"),
        (torch.zeros(8), torch.zeros(1, 1, dtype=torch.int32), [0], "logits must"),
        (torch.zeros(8, 2).t(), torch.zeros(1, 1, dtype=torch.int32), [0, 0], "dense"),
        (torch.zeros(1, 8).expand(2, 8), torch.zeros(1, 1, dtype=torch.int32), [0, 0], "overlap"),
        (torch.zeros(2, 8).double(), torch.zeros(1, 1, dtype=torch.int32), [0, 0], "float32"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_read(logits, mask, rows, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.plait.token_mask_(logits, mask, torch.tensor(rows, dtype=torch.int32))


def test_the_op_is_registered_soundly():
    logits, mask, rows = example_token_mask(3, 70, 2)
    token_mask_(logits, mask, rows)  # registers the fake
    torch.library.opcheck(torch.ops.plait.token_mask_, (logits, mask, rows))
