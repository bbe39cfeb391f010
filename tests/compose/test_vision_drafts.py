"""Drafts of every source for answers about images: no token is another for them."""

import random
from dataclasses import replace

import pytest
from support.drafting import EagerEconomy, accepted, set_economy, verified
from support.eagle_heads import HeadShape, head_tensors, write_head
from support.synthetic_drafters import sometimes
from support.tiny_vision import FAMILIES
from support.vision_prompts import make_prompt
from support.vision_served import ServedVision, make_served_checkpoint, request_of

from plait.platform.core import Speculation
from plait.platform.drafting import NoDrafts
from plait.speculative.model_drafts import ModelDrafts
from plait.speculative.speculator import Speculator

LAYERS = 2  # of the language models


@pytest.fixture(scope="module")
def world(tmp_path_factory, checkpoint):
    """By family: a checkpoint, requests of all kinds for it, and their answers without drafts."""
    made = {}

    def get(family):
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            model = make_served_checkpoint(family, directory)
            asked = requests(family, model)
            engine = ServedVision(directory, enable_prefix_caching=False)
            engine.engine._drafter = NoDrafts()
            plain = {}
            for one in asked:
                plain |= engine.tokens([one])
            made[family] = directory, asked, plain
        return made[family]

    return get


def requests(family, model):
    """Images first, in the middle and last, of several sizes, several at once, text beside them."""
    sizes, rng = FAMILIES[family].sizes, random.Random(0)
    places = [(sizes[0], 9), (4, sizes[-1], 5), (3, sizes[1], 2, sizes[0], 1), (20,), (6, sizes[0])]
    return [
        request_of(
            model,
            make_prompt(family, model, pieces, seed=i % 3),
            f"{i}",
            max_tokens=rng.choice([5, 24]),
            temperature=rng.choice([0.0, 0.9]),
            seed=i,
            n=rng.choice([1, 1, 2]),
            repetition_penalty=rng.choice([1.0, 1.2]),
        )
        for i, pieces in enumerate(places * 2)
    ]


@pytest.mark.parametrize("source", ["text", "model", "head", "right half of the time"])
@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3"])
def test_answers_about_images_are_the_same_with_drafts(world, checkpoint, tmp_path, family, source):
    directory, asked, plain = world(family)
    draft = None
    if source == "model":
        draft = str(checkpoint("llama"))
    elif source == "head":
        shape = HeadShape(taps=(0, 1, LAYERS))
        draft = str(write_head(tmp_path / "head", shape, head_tensors(shape)))
    rows = {"llava": 64, "qwen3_vl": 16, "gemma3": 512}[family]
    engine = ServedVision(
        directory, draft_model=draft, max_draft_tokens=5, max_num_batched_tokens=rows
    )
    drafter = engine.engine.drafter
    assert isinstance(drafter, Speculator)
    if source == "right half of the time":
        oracle = sometimes(plain, 0.5, 290)
        made = ModelDrafts(oracle, drafter._economy, drafter._tally)
        drafter._model = drafter._candidates._model = made
    set_economy(drafter, EagerEconomy())
    assert engine.tokens(asked, random.Random(1)) == plain
    stats = engine.engine.stats
    name = {"head": "eagle", "text": "ngram"}.get(source, "model")
    assert verified(stats, name) > 0
    if source == "right half of the time":
        assert accepted(stats, name) > verified(stats, name) / 8
    silent = [replace(one, speculation=Speculation(enabled=False)) for one in asked]
    assert engine.tokens(silent) == plain
    assert engine.engine.stats.drafts == stats.drafts
