"""Rows of packed weights: the bits of the reference, whatever the format."""

import pytest
import torch

from plait.platform.ops.linear import pack_linear
from plait.platform.ops.packed_rows import packed_rows, reference_packed_rows
from plait.platform.ops.quantized_weight import Quantized, Scales, pack_quantized, quantize

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


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("zero_point", [None, 8])
def test_scales_of_two_levels(group: int, zero_point: int | None) -> None:
    generator = torch.Generator().manual_seed(group)
    shape = (20, 300 // group + 1)
    in_features = shape[1] * group - 5

    def levels() -> torch.Tensor:
        numbers = torch.randint(1, 64, shape, generator=generator).float()
        numbers[:, :: 256 // group] = 63.0
        factors = torch.rand(20, 1, generator=generator).to(torch.float16).float()
        return numbers * factors

    codes = torch.randint(0, 16, (20, in_features), generator=generator).to(torch.uint8)
    scales = levels()
    mins = -levels() if zero_point is None else -zero_point * scales
    given = Quantized(codes=codes, bits=4, group=group, scales=scales, mins=mins)
    packed = pack_quantized(given, activations="int8")
    assert packed.scales is Scales.TWO_LEVELS
    ids = torch.arange(20).flip(0)
    assert torch.equal(packed_rows(packed, ids, torch.float32), given.unpack()[ids])
