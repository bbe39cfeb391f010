"""A row's bits never depend on what else is encoded or computed beside it."""

from dataclasses import replace

import pytest
import torch
from support.tiny_vision import FAMILIES, make_vision_checkpoint
from support.vision_driver import VisionDriver
from support.vision_prompts import make_prompt
from support.vision_tracks import layouts, load, track_of

from plait.platform.ops._native import has_kernels

pytestmark = pytest.mark.skipif(not has_kernels(), reason="the C++ kernels are not built")


CASES = [(family, "float32") for family in FAMILIES] + [
    (family, "bfloat16") for family in ("llava", "qwen2_5_vl", "qwen3_vl_moe", "gemma3", "mistral3")
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_hidden_rows_are_bitwise_equal_alone_and_in_a_mix(family, dtype, tmp_path):
    model = make_vision_checkpoint(family, tmp_path)
    executor = load(tmp_path, dtype)
    prompts = [make_prompt(family, model, parts, seed=i) for i, parts in enumerate(layouts(family))]

    def tracks():
        return [
            track_of(model, prompt, start_step=i, num_output=5) for i, prompt in enumerate(prompts)
        ]

    alone, mixed = tracks(), tracks()
    for track in alone:
        VisionDriver(executor, seed=3).run([track], chunk=64)
    VisionDriver(executor, seed=4).run(mixed, chunk=7)
    for one, other in zip(alone, mixed, strict=True):
        assert one.output == other.output
        assert torch.equal(torch.stack(one.hidden), torch.stack(other.hidden))
        for position, row in one.embeds.items():
            assert torch.equal(row, other.embeds[position])


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_plain_positions_are_three_equal_rows(family, tmp_path):
    model = make_vision_checkpoint(family, tmp_path)
    executor = load(tmp_path)
    track = track_of(model, make_prompt(family, model, (9,)))
    driver = VisionDriver(executor)
    batch = driver._batch([track], [9])
    assert batch.positions.shape == (3, 9)
    plain = replace(batch, positions=batch.positions[0].copy())
    assert torch.equal(executor.forward(plain), executor.forward(batch))
