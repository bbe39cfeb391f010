"""K and V in whole numbers: what is kept of a head, and that kernel and reference keep the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.platform.config import KV_SCALE_BYTES
from plait.platform.ops.kv_codes import from_codes, to_codes
from plait.platform.ops.kv_write import example_kv_write, kv_write, reference_kv_write


def written(write, shape, dtype, change=lambda rows: rows):
    pages, layer, key, value, slots = example_kv_write(*shape, dtype=dtype)
    kept = torch.full((*pages.shape[:-1], shape[2] + KV_SCALE_BYTES), 77, dtype=torch.int8)
    slots[::5] = -1
    write(kept, layer, change(key), change(value[..., : max(1, shape[2] - 3)]), slots)
    return kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 3, 64), (9, 1, 1), (33, 2, 17), (21, 4, 128)])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 0.0])
def test_kernel_and_reference_keep_the_same_bytes(dtype, shape, size):
    def scaled(rows):
        return rows * size

    got, wanted = [], []
    for to, write in ((got, kv_write), (wanted, reference_kv_write)):
        torch.manual_seed(3)
        to.append(written(write, shape, dtype, scaled))
    assert torch.equal(got[0], wanted[0])


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
)
def test_a_value_is_off_by_half_a_code_at_most(values):
    row = torch.tensor(values)
    error = (from_codes(to_codes(row)).double() - row.double()).abs().max().item()
    # 1e-36: what is less than that all over is kept as zeros.
    assert error <= row.double().abs().max().item() / 127 * 0.5001 + 1e-36


@pytest.mark.parametrize("write", [kv_write, reference_kv_write])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_head_that_is_not_finite_is_nan_and_its_neighbours_are_not(write, bad):
    rows = torch.randn(4, 2, 8)
    rows[1, 0, 5] = bad
    kept = torch.zeros(1, 1, 2, 2, 4, 8 + KV_SCALE_BYTES, dtype=torch.int8)
    write(kept, 0, rows, rows, torch.arange(4))
    for half in from_codes(kept)[0, 0]:
        assert half[0, 1].isnan().all()
        assert half[0, [0, 2, 3]].isfinite().all()
        assert half[1].isfinite().all()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (torch.zeros(1, 2, 8, dtype=torch.int8), torch.zeros(1, 2, 8), "key must be float32 or"),
        (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8).bfloat16(), "value must be of the key's dtype"),
        (torch.zeros(1, 2, 9), torch.zeros(1, 2, 9), "the pages have only 8"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(key, value, message):
    kept = torch.zeros(1, 1, 2, 2, 4, 8 + KV_SCALE_BYTES, dtype=torch.int8)
    with pytest.raises(RuntimeError, match=message):
        kv_write(kept, 0, key, value, torch.zeros(1, dtype=torch.int64))
