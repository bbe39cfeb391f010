"""What the trained tower and its adapter are for: fresh pictures, told as they were drawn."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration
from transformers.models.clip import CLIPImageProcessorPil

from plait import LLM, SamplingParams, StructuredOutputs
from plait.platform.demo.assemble import PARTS
from plait.platform.text.tokenizer import Tokenizer

TRAINING = Path(__file__).parents[2] / "examples" / "training"
NUM_PICTURES = 20


@pytest.fixture(scope="module")
def renders() -> Iterator[Any]:
    sys.path.insert(0, str(TRAINING))
    yield importlib.import_module("renders")
    sys.path.remove(str(TRAINING))


def test_a_caption_in_text_has_the_tokens_of_a_pictures_slots(
    renders: Any, directory: Path
) -> None:
    tokenizer = Tokenizer.load(directory)
    for scene in renders.all_scenes():
        ids = tokenizer.encode(f"Picture:{''.join(scene.slots)}\nWhat", add_special_tokens=False)
        alone = [tokenizer.encode(piece, add_special_tokens=False) for piece in scene.slots]
        assert [[one] for one in ids[2:18]] == alone, scene
        assert len(ids) == 2 + renders.SLOTS + 2


@torch.no_grad()
def test_the_tower_says_captions_in_the_language_models_own_embeddings(
    renders: Any, directory: Path
) -> None:
    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    table = model.get_input_embeddings().weight
    processor = CLIPImageProcessorPil.from_pretrained(directory)
    tokenizer = Tokenizer.load(directory)
    rng = random.Random(77)
    drawn = [renders.draw_scene(rng) for _ in range(NUM_PICTURES)]
    pixels = processor(images=[one.image for one in drawn], return_tensors="pt")["pixel_values"]
    said = model.model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    right = 0
    for slots, one in zip(said, drawn, strict=True):
        wanted = [tokenizer.encode(p, add_special_tokens=False)[0] for p in one.scene.slots]
        right += torch.cdist(slots, table).argmin(-1).tolist() == wanted
    assert right >= 0.85 * NUM_PICTURES


def test_fresh_pictures_are_told_right_and_in_the_schema(renders: Any, directory: Path) -> None:
    sight = importlib.import_module("tasks.sight")
    rng = random.Random(78)
    drawn = [renders.draw_scene(rng) for _ in range(NUM_PICTURES)]
    chats = [
        [{"role": "user", "content": [
            {"type": "text", "text": sight.DESCRIBE}, {"type": "image", "image": one.image},
        ]}]
        for one in drawn
    ]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM(
        str(directory), adapters={"sight": PARTS / "sight"}, kv_cache_bytes=64 << 20, num_threads=1
    ) as llm:
        outputs = llm.chat(
            chats, params, adapter="sight", structured_outputs=StructuredOutputs(json=sight.SCHEMA)
        )
    told = [json.loads(output.outputs[0].text) for output in outputs]
    right = sum(t == sight.facts(one.scene) for t, one in zip(told, drawn, strict=True))
    assert right >= 0.8 * NUM_PICTURES
