"""transformers is the oracle for prompts with images: same greedy tokens, same log-probabilities."""

import pytest
import torch
from support.tiny_vision import (
    FAMILIES,
    grid_positions,
    make_prompt,
    make_vision_checkpoint,
    oracle_logits,
)
from support.vision_driver import ImageTrack, VisionDriver

from plait.platform.config import Options
from plait.platform.model import load_model

NUM_OUTPUT = 12


def track_of(model, prompt, *, start_step=0, num_output=NUM_OUTPUT):
    positions, delta = grid_positions(model, prompt)
    return ImageTrack(
        tokens=list(prompt.tokens),
        num_output=num_output,
        start_step=start_step,
        items=prompt.items,
        positions=positions,
        position_delta=delta,
        spans=prompt.spans,
    )


def layouts(family):
    """Images in the middle, first and last, several of odd sizes, and none at all."""
    sizes = FAMILIES[family].sizes
    if family == "paligemma":  # its prompts begin with their one image
        return [(sizes[0], 9), (sizes[0], 21), (sizes[0], 1)]
    several = [part for size in sizes[1:] for part in (size, 2)]
    return [(11, sizes[-1], 5), (sizes[0], 3, *several, sizes[0]), (30,)]


def load(directory, **options):
    return load_model(Options(model=str(directory), dtype="float32", **options)).executor


def check_against(model, prompts, tracks, tolerance=1e-4):
    for prompt, track in zip(prompts, tracks, strict=True):
        wanted = oracle_logits(model, prompt, track.tokens[:-1]).log_softmax(-1)
        torch.testing.assert_close(torch.stack(track.logprobs), wanted, rtol=0, atol=tolerance)
        assert track.output == wanted[-len(track.output) :].argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_images_first_middle_and_last_equal_transformers(family, tmp_path):
    model = make_vision_checkpoint(family, tmp_path)
    prompts = [
        make_prompt(family, model, layout, seed=i) for i, layout in enumerate(layouts(family))
    ]
    tracks = [track_of(model, prompt, start_step=i) for i, prompt in enumerate(prompts)]
    VisionDriver(load(tmp_path)).run(tracks)
    check_against(model, prompts, tracks)
