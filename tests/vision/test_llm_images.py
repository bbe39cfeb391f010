"""Conversations with images in the offline API, up to the request that the engine gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.images import encoded, picture
from support.seeing import make_seeing_checkpoint
from support.tiny_processors import SPECS, oracle_inputs

from plait import LLM, BadRequest, SamplingParams
from plait.platform.core import Request
from plait.platform.errors import ModelUnsupported, Unsupported

FAMILY = "qwen2_vl"


class TakenError(Exception):
    """Ends a call where its request would go on into the engine."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("seeing")
    make_seeing_checkpoint(FAMILY, directory)
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


def test_a_model_whose_images_cannot_be_processed_serves_text_alone_where_that_is_asked(
    tmp_path: Path,
) -> None:
    make_seeing_checkpoint(FAMILY, tmp_path)
    for path in tmp_path.glob("*processor_config.json"):
        path.unlink()
    options = {"kv_cache_bytes": 8 << 20, "num_threads": 1}
    with pytest.raises(ModelUnsupported, match="--encoder-cache-memory 0 the model serves text"):
        LLM(str(tmp_path), **options)
    with LLM(str(tmp_path), encoder_cache_bytes=0, **options) as llm:
        assert any("images are refused" in note for note in llm.config.model.notes)
        (answer,) = llm.chat(
            [{"role": "user", "content": "hello"}],
            SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
        )
        assert len(answer.outputs[0].token_ids) == 3
        with pytest.raises(Unsupported, match="started with --encoder-cache-memory 0"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": picture()}]}])
        token = llm.config.model.vision.image_token_id  # type: ignore[union-attr]
        with pytest.raises(BadRequest, match="stands for images"):
            llm.generate([[5, token]])


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "paligemma", "llava_onevision"])
def test_answers_about_images_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    spec = SPECS[family]
    oracle = make_seeing_checkpoint(family, tmp_path)
    pictures = [picture(48, 32), picture(20, 60, seed=1)]
    content = [
        {"type": "image", "image": pictures[0]},
        {"type": "text", "text": "and then"},
        {"type": "image", "image": pictures[1]},
        {"type": "text", "text": "what is it?"},
    ]
    if spec.model_type == "paligemma":
        content, pictures = content[:2], pictures[:1]
    messages = [{"role": "user", "content": content}]
    plain = [{"type": "image"} if p["type"] == "image" else p for p in content]
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    # Steps shorter than a prompt, so that they would cut images if they could.
    options = {"kv_cache_bytes": 8 << 20, "num_threads": 1, "max_num_batched_tokens": 48}
    with LLM(str(tmp_path), **options) as llm:
        first, again = llm.chat([messages, messages], params)
        text = llm.tokenizer.render_chat([{"role": "user", "content": plain}])
    made = oracle_inputs(family, text, pictures)
    inputs = {k: torch.from_numpy(np.asarray(v)) for k, v in made.items() if k != "labels"}
    with torch.no_grad():
        output = oracle.generate(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False)
    wanted = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == wanted
