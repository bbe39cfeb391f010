"""What an image encoder and a step with images refuse, and that they name it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny_models import make_checkpoint
from support.tiny_vision import make_vision_checkpoint
from support.vision_driver import VisionDriver
from support.vision_prompts import make_prompt
from support.vision_tracks import load, track_of

from plait.platform.config import Options
from plait.platform.errors import InternalError
from plait.platform.model import check_model, load_model


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3_vl")
    model = make_vision_checkpoint("qwen3_vl", directory)
    executor = load(directory)
    prompt = make_prompt("qwen3_vl", model, (3, (2, 2), 4))
    return directory, model, executor, prompt


def test_a_model_tells_how_it_takes_images(world):
    directory, _, executor, _ = world
    vision = executor.model.vision
    assert (vision.family, vision.hidden_size, vision.num_levels) == ("qwen3_vl", 64, 3)
    assert (vision.image_token_id, vision.has_grid_positions) == (300, True)
    report = check_model(Options(model=str(directory)))
    assert report.servable
    assert report.num_adapter_sites == len(executor.sites.sites)


def test_a_text_model_takes_no_images(world, tmp_path):
    executor = load_model(Options(model=str(make_checkpoint("llama", tmp_path)))).executor
    assert executor.model.vision is None
    with pytest.raises(InternalError, match="LlamaForCausalLM takes no images"):
        executor.encode(world[3].items)


def test_an_image_without_what_its_family_needs_is_named(world):
    *_, executor, prompt = world
    item = replace(
        prompt.items[0], tensors={"pixel_values": prompt.items[0].tensors["pixel_values"]}
    )
    with pytest.raises(InternalError, match=f"{item.key[:12]} comes without image_grid_thw"):
        executor.encode([item])


def test_an_image_with_other_room_in_its_prompt_than_the_tower_fills_is_named(world):
    *_, executor, prompt = world
    item = replace(prompt.items[0], embedded=((0, 3),))
    with pytest.raises(InternalError, match=f"4 embeddings of images {item.key[:12]}.*room for 3"):
        executor.encode([item])


def test_a_step_with_images_needs_every_level_of_every_row(world):
    _, model, executor, prompt = world
    driver = VisionDriver(executor)
    track = track_of(model, prompt)
    embeds = executor.encode(prompt.items)[0]
    track.embeds = {3 + i: row for i, row in enumerate(embeds)}
    batch = driver._batch([track], [8])
    assert executor.forward(batch, embeds).shape == (8, 64)
    for given in (None, embeds[:3], embeds[:, :64]):
        with pytest.raises(InternalError, match="embeds"):
            executor.forward(batch, given)
    with pytest.raises(InternalError, match="out of order"):
        executor.forward(replace(batch, image_rows=batch.image_rows[::-1].copy()), embeds)
    with pytest.raises(InternalError, match="positions of shape"):
        executor.forward(replace(batch, positions=np.zeros((2, 8), np.int64)), embeds)


def test_levels_of_the_tower_reach_the_layers_that_they_are_for(world):
    """Without them another answer comes out: DeepStack is not dropped in silence."""
    _, model, executor, prompt = world
    driver = VisionDriver(executor)
    track = track_of(model, prompt)
    embeds = executor.encode(prompt.items)[0]
    track.embeds = {3 + i: row for i, row in enumerate(embeds)}
    batch = driver._batch([track], [8])
    whole = executor.forward(batch, embeds)
    without = embeds.clone()
    without[:, 64:] = 0
    assert not torch.allclose(whole, executor.forward(batch, without), atol=1e-2)
