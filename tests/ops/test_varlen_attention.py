import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cpu_isa

from plait.platform.ops._native import has_kernels
from plait.platform.ops.varlen_attention import (
    example_varlen,
    reference_varlen_attention,
    tolerance,
    varlen_attention,
)

DTYPES = (torch.float32, torch.bfloat16)
HEAD_SIZES = (16, 40, 64, 72, 80, 96, 128)


@pytest.fixture(autouse=True, params=cpu_isa.available())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs once on each instruction set that this processor has."""
    monkeypatch.setenv("PLAIT_CPU_ISA", request.param)
    return str(request.param)


def exact(query, key, value, query_bounds, key_bounds=None, *, scale):
    """In fp64: sums of exponentials, no softmax."""
    rows = query_bounds.tolist()
    keys = rows if key_bounds is None else key_bounds.tolist()
    out = torch.zeros_like(query, dtype=torch.float64)
    for s in range(len(rows) - 1):
        q = query[rows[s] : rows[s + 1]].double()
        k, v = (x[keys[s] : keys[s + 1]].double() for x in (key, value))
        weights = (torch.einsum("thd,khd->thk", q, k) * scale).exp()
        if k.shape[0]:
            total = weights.sum(dim=2, keepdim=True)
            out[rows[s] : rows[s + 1]] = torch.einsum("thk,khd->thd", weights, v) / total
    return out


def check(op, *args, scale=0.2):
    out = op(*args, scale=scale)
    assert out.dtype is args[0].dtype
    assert out.shape == args[0].shape
    torch.testing.assert_close(out.double(), exact(*args, scale=scale), **tolerance(out.dtype))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("op", [varlen_attention, reference_varlen_attention])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [1, 3, 8, 17, *HEAD_SIZES])
def test_every_head_size_is_right(op, dtype, head_size):
    example = example_varlen(
        (37, 1, 5), num_heads=2, head_size=head_size, dtype=dtype, generator=seeded()
    )
    check(op, *example)


@pytest.mark.parametrize("op", [varlen_attention, reference_varlen_attention])
@pytest.mark.parametrize("lengths", [(), (0,), (0, 3, 0), (1,), (64,) * 5, (7, 129, 128, 127)])
def test_every_cut_into_segments_is_right(op, lengths):
    check(op, *example_varlen(lengths, head_size=24, generator=seeded()))


@pytest.mark.parametrize(
    "length", [5, 6, 7, 31, 32, 33, 47, 48, 49, 95, 97, 127, 128, 129, 257, 383, 384, 385]
)
def test_lengths_around_tiles_are_right(length):
    check(
        varlen_attention, *example_varlen((length,), num_heads=1, head_size=8, generator=seeded())
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sharp_maximum_in_any_tile_is_right(dtype):
    for peak in (0, 100, 130, 259):
        query, key, value, bounds = example_varlen((260,), head_size=16, generator=seeded())
        key[peak] *= 40
        check(varlen_attention, query.to(dtype), key.to(dtype), value.to(dtype), bounds)


@pytest.mark.parametrize("op", [varlen_attention, reference_varlen_attention])
def test_segments_may_have_fewer_keys_than_rows_or_none(op):
    query, key, value, bounds = example_varlen((9, 40, 3, 6), head_size=24, generator=seeded())
    key_bounds = torch.tensor([0, 2, 41, 41, 50], dtype=torch.int32)
    check(op, query, key[:50], value[:50], bounds, key_bounds)


@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    head_size=st.sampled_from(HEAD_SIZES),
    num_heads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=15, deadline=None)
def test_a_segment_has_the_same_bits_alone_and_among_others(lengths, head_size, num_heads, dtype):
    example = example_varlen(
        tuple(lengths), num_heads=num_heads, head_size=head_size, dtype=dtype, generator=seeded()
    )
    *tensors, bounds = example
    together = varlen_attention(*example, scale=0.2)
    for start, length in zip(bounds.tolist(), lengths, strict=False):
        parts = [t[start : start + length] for t in tensors]
        own = torch.tensor([0, length], dtype=torch.int32)
        assert torch.equal(
            varlen_attention(*parts, own, scale=0.2), together[start : start + length]
        )


@pytest.mark.skipif(not has_kernels(), reason="the C++ kernels are not built")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_rows_and_on_any_threads(dtype):
    query, key, value, bounds = example_varlen(
        (700,), num_heads=2, head_size=72, dtype=dtype, generator=seeded()
    )
    whole = varlen_attention(query, key, value, bounds, scale=0.2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(varlen_attention(query, key, value, bounds, scale=0.2), whole)
    finally:
        torch.set_num_threads(before)
    for start, end in ((0, 1), (3, 10), (100, 148), (250, 700)):
        some = torch.tensor([0, end - start], dtype=torch.int32)
        out = varlen_attention(query[start:end], key, value, some, bounds, scale=0.2)
        assert torch.equal(out, whole[start:end])


def test_heads_and_rows_may_lie_apart():
    query, key, value, bounds = example_varlen((20, 30), head_size=24, generator=seeded())
    merged = torch.cat([query, key, value], dim=1)  # one row of all projections
    views = merged.split(3, dim=1)
    assert not views[0].is_contiguous()
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    expected = varlen_attention(query, key, value, bounds, scale=0.2)
    assert torch.equal(varlen_attention(*views, bounds, scale=0.2), expected)
    assert torch.equal(varlen_attention(*apart, bounds, scale=0.2), expected)


def test_a_nan_reaches_its_own_segment_and_no_other():
    query, key, value, bounds = example_varlen((50, 50), head_size=24, generator=seeded())
    key[20] = torch.nan
    out = varlen_attention(query, key, value, bounds, scale=0.2)
    assert out[:50].isnan().all()
    assert out[50:].isfinite().all()


@pytest.mark.skipif(not has_kernels(), reason="the C++ kernels are not built")
def test_refusals_name_the_op():
    query, key, value, bounds = example_varlen((4, 5))
    for args, message in (
        ((query.double(), key, value, bounds), "query must be float32 or bfloat16"),
        ((query, key.bfloat16(), value, bounds), "key must be on the CPU and of the query's dtype"),
        ((query, key, value[:, :2], bounds), "value must be"),
        ((query, key[:8], value[:8], bounds), "key_bounds must lead from 0 to 8"),
        ((query, key, value, bounds.long()), "query_bounds must be dense int32"),
        ((query, key, value, torch.tensor([0, 9, 4, 9], dtype=torch.int32)), "falls at segment 1"),
    ):
        with pytest.raises(RuntimeError, match=f"plait::varlen_attention: .*{message}"):
            varlen_attention(*args, scale=0.2)
    with pytest.raises(RuntimeError, match="scale must be positive"):
        varlen_attention(query, key, value, bounds, scale=0.0)


@pytest.mark.skipif(not has_kernels(), reason="the C++ kernels are not built")
def test_torch_accepts_the_op():
    query, key, value, bounds = example_varlen((4, 5))
    torch.library.opcheck(
        torch.ops.plait.varlen_attention, (query, key, value, bounds, bounds, 0.2)
    )
