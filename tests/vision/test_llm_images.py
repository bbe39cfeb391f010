"""Conversations with images in the offline API, up to the request that the engine gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.images import encoded, picture
from support.tiny_processors import SPECS, make_processor_files, oracle_inputs
from support.tiny_vision import make_vision_model

from plait import LLM, BadRequest, SamplingParams
from plait.platform.core import Request
from plait.platform.errors import Unsupported

FAMILY = "qwen2_vl"


class TakenError(Exception):
    """Ends a call where its request would go on into the engine."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("seeing")
    make_processor_files(FAMILY, directory)
    tokens = json.loads((directory / "tokenizer.json").read_text())["added_tokens"]
    token = next(t["id"] for t in tokens if t["content"] == SPECS[FAMILY].embedded)
    model = make_vision_model(FAMILY, vocab_size=1600)
    model.config.image_token_id = token
    model.save_pretrained(directory)
    with LLM(str(directory), kv_cache_bytes=8 << 20, num_threads=1) as made:
        yield made


def asked(llm: LLM, call: Any, monkeypatch: pytest.MonkeyPatch) -> Request:
    taken: list[Request] = []

    def take(request: Request) -> None:
        taken.append(request)
        raise TakenError

    with monkeypatch.context() as patched:
        patched.setattr(llm._engine, "add", take)
        with pytest.raises(TakenError):
            call()
    return taken[0]


def test_pictures_bytes_and_paths_are_the_same_image(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, two = picture(48, 32), picture(20, 60, seed=1)
    (tmp_path / "two.png").write_bytes(encoded(two))
    content = [
        {"type": "image", "image": one},
        {"type": "text", "text": "or"},
        {"type": "image", "image": tmp_path / "two.png"},
        {"type": "image", "image": encoded(two)},
    ]
    messages = [{"role": "user", "content": content}]
    request = asked(llm, lambda: llm.chat(messages, SamplingParams(max_tokens=2)), monkeypatch)
    plain = [{"type": "image"} if p["type"] == "image" else p for p in content]
    text = llm.tokenizer.render_chat([{"role": "user", "content": plain}])
    made = oracle_inputs(FAMILY, text, [one, two, two])
    assert list(request.prompt_token_ids) == made["input_ids"][0].tolist()
    assert llm.encode_chat(messages) == list(request.prompt_token_ids)
    first, second, third = request.images
    assert first.key != second.key == third.key
    assert first.tensors["pixel_values"].data + second.tensors["pixel_values"].data * 2 == (
        made["pixel_values"].tobytes()
    )
    assert request.positions
    streamed = asked(llm, lambda: list(llm.stream_chat(messages)), monkeypatch)
    assert streamed.images == request.images


def test_image_tokens_come_with_images_alone(llm: LLM) -> None:
    assert llm.config.model.vision is not None
    with pytest.raises(BadRequest, match="which stands for images"):
        llm.generate([[5, llm.config.model.vision.image_token_id]])
    with pytest.raises(BadRequest, match=r"messages\[0\].content holds '<\|image_pad\|>'"):
        llm.chat([{"role": "user", "content": "<|image_pad|>"}])
    with pytest.raises(Unsupported, match="video_url"):
        llm.chat([{"role": "user", "content": [{"type": "video_url"}]}])
