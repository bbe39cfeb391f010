"""Rows of packed weights: the bits of the reference, whatever the format."""

import pytest
import torch

from plait.platform.ops.linear import pack_linear
from plait.platform.ops.packed_rows import packed_rows, reference_packed_rows
from plait.platform.ops.quantized_weight import Quantized, pack_quantized, quantize

SHAPES = ((1, 1), (5, 7), (16, 32), (35, 100), (48, 257))
IDS = torch.tensor([0, 0, 3, 1, 4])


def weight(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    whole = weight(shape).to(dtype)
    ids = torch.cat([IDS % shape[0], torch.arange(shape[0]).flip(0)])
    packed = pack_linear(whole)
    assert torch.equal(packed_rows(packed, ids, dtype), whole[ids])
    assert torch.equal(reference_packed_rows(packed, ids, dtype), whole[ids])
    assert packed_rows(packed, ids[:0], dtype).shape == (0, shape[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 1000])
@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e6])
def test_rows_of_quantised_weights(
    shape: tuple[int, int], dtype: torch.dtype, bits: int, group: int, scale: float
) -> None:
    packed = pack_quantized(
        quantize(weight(shape) * scale, bits=bits, group=group), activations="int8"
    )
    ids = torch.cat([IDS % shape[0], torch.arange(shape[0]).flip(0)])
    expected = reference_packed_rows(packed, ids, dtype)
    assert torch.equal(packed_rows(packed, ids, dtype), expected)


def test_minimums_that_are_stored_and_scales_that_fp16_does_not_hold() -> None:
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (20, 64), generator=generator).to(torch.uint8)
    scales, mins = torch.rand(2, 20, 2, generator=generator)
    given = Quantized(codes=codes, bits=4, group=32, scales=scales, mins=mins)
    packed = pack_quantized(given, activations="exact")
    assert packed.zero_point is None
    rows = packed_rows(packed, torch.arange(20), torch.float32)
    assert torch.equal(rows, given.unpack())


@pytest.mark.parametrize("wrong", [-1, 16])
def test_a_row_that_there_is_not(wrong: int) -> None:
    packed = pack_linear(weight((16, 8)))
    with pytest.raises(RuntimeError, match=f"no row {wrong} among 16"):
        packed_rows(packed, torch.tensor([0, wrong]), torch.float32)
