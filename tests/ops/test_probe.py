import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import cpu_isa

from plait.platform.ops import probe

KERNELS = cpu_isa.available()


@pytest.fixture(params=KERNELS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


@given(
    st.integers(0, 70) | st.integers(120, 140) | st.integers(1000, 1100), st.integers(0, 1 << 31)
)
def test_every_word_is_read_once(size, seed):
    words = np.random.default_rng(seed).integers(-(2**63), 2**63, size, dtype=np.int64)
    expected = int(np.bitwise_xor.reduce(words)) if size else 0
    given_words = torch.from_numpy(words)
    assert probe.reference_read_words(given_words) == expected
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setenv("PLAIT_CPU_ISA", name)
            assert probe.read_words(given_words) == expected, name


@pytest.mark.parametrize("kind", probe.ARITHMETIC)
def test_the_count_is_that_of_the_work_done(isa, kind):
    per_round = probe.multiply_adds(kind, 1)
    assert per_round >= 32  # several registers' lanes
    assert probe.multiply_adds(kind, 0) == 0
    for rounds in (2, 1001):
        assert probe.multiply_adds(kind, rounds) == rounds * per_round


def test_wider_registers_do_more_at_once():
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            patch.setenv("PLAIT_CPU_ISA", name)
            counts.append(probe.multiply_adds("int8", 1))
    assert counts == sorted(counts)


def test_a_barrier_ends_in_time_and_gives_what_it_took():
    samples = probe.barrier_ns(0.02, size=50)
    assert 0 < len(samples) <= 50
    assert bool((samples >= 0).all())
    assert len(probe.barrier_ns(0.0)) == 0


def test_what_is_not_understood_is_refused():
    with pytest.raises(RuntimeError, match="no such type as float64"):
        probe.multiply_adds("float64", 1)
    with pytest.raises(RuntimeError, match="rounds must be"):
        probe.multiply_adds("int8", -1)
    with pytest.raises(RuntimeError, match="words must be int64"):
        torch.ops.plait.probe_read(torch.zeros(4))
    with pytest.raises(RuntimeError, match="words must be int64 and dense"):
        probe.read_words(torch.zeros(8, dtype=torch.int64)[::2])
