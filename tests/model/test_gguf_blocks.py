"""GGUF blocks read as codes: the numbers are llama.cpp's to the bit."""

import gguf
import numpy as np
import pytest

from plait.platform.model.gguf_blocks import BLOCK_TYPES, read_blocks


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_codes_stand_for_the_numbers_that_gguf_expands_to(kind, num_blocks):
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(kind)
    data = random.integers(0, 256, (5, num_blocks, block_bytes), dtype=np.uint8)
    for at in half_precision_fields(kind):  # any bits but those of infinities
        values = random.standard_normal((5, num_blocks)).astype(np.float16)
        data[..., at : at + 2] = values[..., None].view(np.uint8)
    data = data.reshape(5, -1)
    weight = read_blocks(data, kind, num_blocks * block_values)
    wanted = gguf.dequantize(data, kind)
    assert int(weight.codes.max()) < 2**weight.bits
    np.testing.assert_array_equal(weight.unpack().numpy(), wanted)


def half_precision_fields(kind):
    """Where a block's d and m lie."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return {
        "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,),
        "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
        "Q2_K": (size - 4, size - 2), "Q3_K": (size - 2,), "Q6_K": (size - 2,),
    }[kind.name]  # fmt: skip
