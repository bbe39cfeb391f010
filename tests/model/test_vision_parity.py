"""transformers is the oracle for prompts with images: same greedy tokens and log-probabilities."""

import pytest
import torch
from support.tiny_vision import FAMILIES, make_vision_checkpoint
from support.vision_driver import VisionDriver
from support.vision_prompts import make_prompt, oracle_logits
from support.vision_tracks import layouts, load, track_of


def check_against(model, prompts, tracks, tolerance=1e-4):
    for prompt, track in zip(prompts, tracks, strict=True):
        wanted = oracle_logits(model, prompt, track.tokens[:-1]).log_softmax(-1)
        torch.testing.assert_close(torch.stack(track.logprobs), wanted, rtol=0, atol=tolerance)
        assert track.output == wanted[-len(track.output) :].argmax(-1).tolist()


def run_layouts(family, model, executor, **options):
    prompts = [make_prompt(family, model, parts, seed=i) for i, parts in enumerate(layouts(family))]
    tracks = [track_of(model, prompt, start_step=i) for i, prompt in enumerate(prompts)]
    VisionDriver(executor, **options).run(tracks)
    return prompts, tracks


@pytest.mark.parametrize("family", FAMILIES)
def test_images_first_middle_and_last_equal_transformers(family, tmp_path):
    model = make_vision_checkpoint(family, tmp_path)
    check_against(model, *run_layouts(family, model, load(tmp_path)))


@pytest.mark.parametrize("family", [f for f, tiny in FAMILIES.items() if (1, 3) in tiny.sizes])
def test_an_image_of_one_embedding_equals_transformers_beside_another(family, tmp_path):
    """Alone, some of transformers' classes cannot take it."""
    model = make_vision_checkpoint(family, tmp_path)
    prompt = make_prompt(family, model, ((1, 1), 1, (1, 1)))
    assert prompt.items[0].num_embeds == 1
    with torch.no_grad():
        made = model.model.get_image_features(**prompt.arguments, return_dict=True).pooler_output
    wanted = torch.cat([part.reshape(-1, part.shape[-1]) for part in made])
    executor = load(tmp_path)
    for item, row in zip(prompt.items, wanted, strict=True):
        (alone,) = executor.encode([item])
        torch.testing.assert_close(alone[:, : row.shape[0]], row[None], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "paligemma"])
def test_the_test_fails_where_ranges_are_dropped(family, tmp_path):
    """The oracle can tell: without ranges the divergence is beyond what rounding explains."""
    model = make_vision_checkpoint(family, tmp_path)
    prompts, tracks = run_layouts(family, model, load(tmp_path), drop_spans=True)
    wanted = oracle_logits(model, prompts[0], tracks[0].tokens[:-1]).log_softmax(-1)
    got = torch.stack(tracks[0].logprobs)
    assert (wanted.exp() * (wanted - got)).sum(-1).max() > 1e-2


def test_a_second_turn_with_another_image_equals_transformers(tmp_path):
    """Positions of Qwen2-VL go on behind the first answer as if it had been in the prompt."""
    model = make_vision_checkpoint("qwen2_vl", tmp_path)
    executor = load(tmp_path)
    prompt = make_prompt("qwen2_vl", model, (4, (3, 5), 3))
    first = track_of(model, prompt, num_output=6)
    VisionDriver(executor).run([first])
    again = make_prompt("qwen2_vl", model, ((1, 3), 5), seed=7)
    for item, picture in zip(again.items, again.pictures, strict=True):
        prompt.items.append(picture.item(len(first.tokens) + item.start))
        prompt.pictures.append(picture)
    prompt.tokens = [*first.tokens, *again.tokens]
    second = track_of(model, prompt)
    VisionDriver(executor).run([second])
    check_against(model, [prompt], [second])


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "smolvlm"])
def test_a_head_that_is_tied_to_the_embedding_equals_transformers(family, tmp_path):
    model = make_vision_checkpoint(family, tmp_path, is_tied=True)
    executor = load(tmp_path)
    assert executor.sites.is_tied
    check_against(model, *run_layouts(family, model, executor))
