"""The bounded argmax gives the token of the exact one, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import cpu_isa

from plait.platform.logits.noise import Noise, stream_key
from plait.platform.ops.gumbel_argmax import gumbel_argmax, reference_gumbel_argmax

# Around the kernel's blocks of 256, and beyond the 2048 tokens up to which nothing is bounded.
SIZES = (1, 2, 255, 2048, 2049, 2303, 2304, 2305, 5003)


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [1e-4, 0.7, 3.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 40.0])
def test_bounds_change_no_result(size: int, temperature: float, scale: float) -> None:
    noise, rng = Noise(size), np.random.default_rng([size, int(scale)])
    for position in range(12):
        logits = (rng.standard_normal(size) * scale + 50).astype(np.float32)
        logits[rng.random(size) < 0.1] = -np.inf
        logits[rng.integers(size)] = 50
        key = stream_key(11, 0, position)
        ids = np.sort(rng.permutation(size)[: size - size // 5])
        if logits[ids].max() == -np.inf:
            continue
        with np.errstate(all="ignore"):
            assert gumbel_argmax(noise, key, logits, temperature) == reference_gumbel_argmax(
                noise, key, logits, temperature
            )
            assert gumbel_argmax(
                noise, key, logits[ids], temperature, ids
            ) == reference_gumbel_argmax(noise, key, logits[ids], temperature, ids)


def test_every_token_of_a_flat_row_wins_as_often() -> None:
    size, num = 4096, 4000
    noise, logits = Noise(size), np.zeros(size, np.float32)
    tokens = [gumbel_argmax(noise, stream_key(3, 0, p), logits, 1.0) for p in range(num)]
    counts = np.bincount(np.array(tokens) // (size // 16), minlength=16)
    assert ((counts - num / 16) ** 2 / (num / 16)).sum() < 15 + 4 * np.sqrt(30)


def test_few_candidates_are_left() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy((rng.standard_normal(50_000) * 3).astype(np.float32))
    top = float(logits.max())
    num = [len(torch.ops.plait.gumbel_candidates(logits, key, top, 0.8)) for key in range(100)]
    assert min(num) >= 1
    assert np.mean(num) < 3


@pytest.mark.parametrize(
    ("logits", "top", "temperature", "message"),
    [
        (torch.zeros(0), 0.0, 1.0, "not empty"),
        (torch.zeros(2, 2), 0.0, 1.0, "must be"),
        (torch.zeros(4, dtype=torch.float64), 0.0, 1.0, "float32"),
        (torch.zeros(8)[::2], 0.0, 1.0, "dense"),
        (torch.zeros(4), float("nan"), 1.0, "finite"),
        (torch.zeros(4), 0.0, 0.0, "temperature"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_read(
    logits: torch.Tensor, top: float, temperature: float, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.plait.gumbel_candidates(logits, 1, top, temperature)


def test_the_op_is_registered_soundly() -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.plait.gumbel_candidates, (torch.zeros(300), -5, 0.0, 1.0), test_utils=checks
    )
