import pytest
import torch

from plait.platform.config import CacheConfig, KVGroup
from plait.platform.kv.pages import create_pages
from plait.platform.ops import _native
from plait.platform.ops.kv_write import example_kv_write, kv_write, reference_kv_write

DTYPES = (torch.float32, torch.bfloat16)
WRITERS = pytest.mark.parametrize("write", [kv_write, reference_kv_write])


def expected_pages(pages, layer, key, value, slots):
    """What the pages hold afterwards, written down value by value."""
    expected = pages.clone()
    block_size, head_size = pages.shape[4:]
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        for half, rows in enumerate((key, value)):
            to = expected[slot // block_size, layer, half, :, slot % block_size]
            to[:] = 0
            to[:, : rows.shape[2]] = rows[row]
    assert head_size >= value.shape[2]
    return expected


def test_the_kernels_are_built():
    assert _native.has_kernels()


@WRITERS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_size", "block_size"),
    [(0, 1, 8, 16), (1, 1, 1, 1), (5, 3, 64, 16), (33, 2, 17, 5), (700, 3, 64, 16)],
)
def test_rows_land_in_their_slots_and_nothing_else_changes(
    write, dtype, num_tokens, num_kv_heads, head_size, block_size
):
    args = example_kv_write(num_tokens, num_kv_heads, head_size, block_size=block_size, dtype=dtype)
    pages, layer, key, value, slots = args
    slots[::3] = -1
    expected = expected_pages(pages, layer, key, value, slots)
    write(pages, layer, key, value, slots)
    assert torch.equal(pages, expected)


@WRITERS
def test_rows_and_heads_may_lie_apart(write):
    pages, layer, _, _, slots = example_kv_write(9, 3, 8)
    key = torch.randn(3, 9, 2, 8)[:, :, 1].transpose(0, 1)
    value = torch.randn(1, 3, 8).expand(9, 3, 8)
    expected = expected_pages(pages, layer, key, value, slots)
    write(pages, layer, key, value, slots)
    assert torch.equal(pages, expected)


@WRITERS
def test_a_narrow_value_is_padded_with_zeros(write):
    pages, layer, key, _, slots = example_kv_write(20, 2, 24)
    value = torch.randn(20, 2, 16)
    expected = expected_pages(pages, layer, key, value, slots)
    write(pages, layer, key, value, slots)
    assert torch.equal(pages, expected)
    assert not expected[slots // 16, layer, 1, :, slots % 16, 16:].any()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_rows_are_the_same_on_any_threads(num_threads):
    pages, layer, key, value, slots = example_kv_write(3000, 4, 64)
    expected = pages.clone()
    reference_kv_write(expected, layer, key, value, slots)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        kv_write(pages, layer, key, value, slots)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(pages, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 2}, "layer 2 is not one of the 2 layers"),
        ({"layer": -1}, "layer -1"),
        ({"key": torch.zeros(4, 2, 8)}, r"key must be \[T, Hkv, D\], it is \[4, 2, 8\]"),
        ({"key": torch.zeros(5, 3, 8)}, "key must be"),
        ({"value": torch.zeros(5, 2, 9)}, "value has head size 9, the pages have only 8"),
        ({"key": torch.zeros(5, 2, 8).bfloat16()}, "key must be of the pages' dtype"),
        ({"key": torch.zeros(8, 2, 5).permute(2, 1, 0)}, "key must be dense along its last"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int32)}, "slot_mapping must be int64"),
        ({"slot_mapping": torch.zeros(5, 1, dtype=torch.int64)}, r"slot_mapping must be \[T\]"),
        ({"slot_mapping": torch.tensor([0, 1, 48, 2, 3])}, "slot 48 of row 2 is beyond the 48"),
        ({"pages": torch.zeros(3, 2, 3, 2, 16, 8)}, "pages must be"),
        ({"pages": torch.zeros(3, 2, 2, 2, 16, 8).double()}, "float32, bfloat16 or int8"),
        ({"pages": torch.zeros(3, 2, 2, 16, 2, 8).transpose(3, 4)}, "pages must be contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, message):
    args = {
        "pages": torch.zeros(3, 2, 2, 2, 16, 8),
        "layer": 0,
        "key": torch.zeros(5, 2, 8),
        "value": torch.zeros(5, 2, 8),
        "slot_mapping": torch.arange(5),
    }
    with pytest.raises(RuntimeError, match=r"plait::kv_write: .*" + message):
        kv_write(**(args | change))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_accepts_the_op(dtype):
    torch.library.opcheck(torch.ops.plait.kv_write, example_kv_write(5, 2, 8, dtype=dtype))


def test_page_tensors_follow_the_configuration():
    groups = (
        KVGroup(layers=(0, 2), window=None, num_kv_heads=3, head_size=64, num_blocks=7),
        KVGroup(layers=(1,), window=8, num_kv_heads=1, head_size=96, num_blocks=4),
    )
    cache = CacheConfig(block_size=16, groups=groups, dtype="bfloat16", enable_prefix_caching=True)
    pages = create_pages(cache)
    assert [p.shape for p in pages] == [(7, 2, 2, 3, 16, 64), (4, 1, 2, 1, 16, 96)]
    for group, tensor in zip(groups, pages, strict=True):
        assert tensor.dtype is torch.bfloat16
        assert tensor.is_contiguous()
        assert not tensor.any()
        assert tensor[0].nbytes == group.bytes_per_block(16, 2)
