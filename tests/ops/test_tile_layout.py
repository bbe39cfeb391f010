"""The bytes of packed quantised weights, as csrc/quantized_weight.h tells."""

import pytest
import torch

from plait.platform.ops.quantized_weight import PackedQuantized, Quantized, pack_quantized
from plait.platform.ops.tile_layout import TileLayout


def layout(**fields: int) -> TileLayout:
    defaults = {"inputs": 512, "bits": 4, "group": 32, "planes": 1, "value_bytes": 2}
    return TileLayout(**(defaults | fields), has_factors=fields.get("value_bytes") == 1)


def packed_counting(bits: int, mins: bool) -> PackedQuantized:
    """Each group has its number as scale, as every code, and its negative as minimum."""
    groups = torch.arange(1, 6).float().expand(16, 5)
    codes = groups.repeat_interleave(32, dim=1).to(torch.uint8)
    least = -groups.flip(1) if mins else torch.zeros_like(groups)
    weight = Quantized(codes=codes, bits=bits, group=32, scales=groups, mins=least)
    return pack_quantized(weight, activations="int8")


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_minimums_lie_in_front_of_their_codes(bits):
    packed = packed_counting(bits, mins=True)
    units = packed.blob.view(5, -1)
    assert packed.zero_point is None
    for g, unit in enumerate(units, 1):
        assert unit[:32].view(torch.float16).eq(g).all()
        assert unit[32:64].view(torch.float16).eq(g - 6).all()
        assert unit[64:].eq(g * 17 if bits == 4 else g).all()


def test_two_groups_share_a_line_of_scales():
    packed = packed_counting(4, mins=False)
    lines = packed.blob.view(-1, 64)
    starts = [0, 9, 18]  # the last has codes of one group
    assert packed.zero_point == 0
    assert len(lines) == 23
    for unit, start in enumerate(starts):
        first = 2 * unit + 1
        assert lines[start, :32].view(torch.float16).eq(first).all()
        assert lines[start, 32:].view(torch.float16).eq(first + 1 if unit < 2 else 0).all()
        assert lines[start + 1 : start + 5].eq(first * 17).all()
        if unit < 2:
            assert lines[start + 5 : start + 9].eq((first + 1) * 17).all()


@pytest.mark.parametrize(
    ("form", "spans", "header"),
    [
        (layout(planes=2), 1, 64),
        (layout(), 2, 64),
        (layout(value_bytes=4), 1, 64),
        (layout(group=128, planes=2, value_bytes=4), 1, 128),
        (layout(value_bytes=1, planes=2), 1, 320),  # Q4_K
        (layout(value_bytes=1, bits=8, group=16), 2, 576),  # Q6_K
        (layout(group=0), 1, 64),
    ],
)
def test_codes_begin_with_a_line(form, spans, header):
    blob = torch.zeros(form.tile_bytes, dtype=torch.uint8)
    ((headers, codes),) = form.units(blob)
    assert form.unit_spans == spans
    assert codes.storage_offset() == header
    assert headers.shape[1] * header + codes.numel() == form.tile_bytes
