"""The noise: known values, uniform, independent."""

from __future__ import annotations

import numpy as np
import pytest

from plait.platform.logits.noise import Noise, stream_key


def test_bits_are_splitmix64() -> None:
    # reference values of the published algorithm for the seed 1234567
    assert Noise(5).bits(1234567, None).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_of_neighbours_differ() -> None:
    keys = {stream_key(s, i, p) for s in (0, 1, 2**63) for i in range(3) for p in range(200)}
    assert len(keys) == 3 * 3 * 200
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
def test_uniform_and_independent_along_each_axis(axis: str) -> None:
    n, noise = 40_000, Noise(40_001)
    if axis == "token":
        bits = noise.bits(stream_key(7, 0, 100), None)
    else:
        keys = [
            stream_key(i, 0, 5) if axis == "seed" else stream_key(7, 0, i) for i in range(n + 1)
        ]
        bits = np.array([noise.bits(key, np.array([17]))[0] for key in keys])
    uniform = bits.astype(np.float64) / 2.0**64
    counts = np.bincount((uniform * 64).astype(int), minlength=64)
    expected = len(uniform) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 4 * np.sqrt(2 * 63)
    pairs = (uniform[:-1] * 8).astype(int) * 8 + (uniform[1:] * 8).astype(int)
    counts = np.bincount(pairs, minlength=64)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 4 * np.sqrt(2 * 63)
    for bit in range(64):
        ones = int(((bits >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - len(bits) / 2) < 4.5 * np.sqrt(len(bits)) / 2


def test_gumbel_has_its_mean_and_variance() -> None:
    noise = Noise(200_000).gumbel(stream_key(1, 2, 3))
    assert abs(noise.mean() - np.euler_gamma) < 0.015
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
