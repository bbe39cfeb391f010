"""Chats with images over HTTP, up to the request that the engine gets."""

import asyncio
import dataclasses
import gc
import re
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine, make_config
from support.http_app import http_client
from support.images import data_url, encoded, picture
from support.tiny_processors import make_processor_files, oracle_inputs, vision_info

from plait.platform.core import Array
from plait.platform.intake import Intake
from plait.platform.server.app import create_app
from plait.platform.server.settings import ServerSettings
from plait.platform.text.tokenizer import Tokenizer
from plait.vision.processor import ImageProcessor

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
FAMILY = "qwen2_vl"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("images") / FAMILY
    make_processor_files(FAMILY, directory)
    return Tokenizer.load(directory), directory


@pytest.fixture
def world(tokenizer):
    """A client of a server whose model sees, and the engine behind it."""
    tokenizer, directory = tokenizer
    vision = vision_info(FAMILY, tokenizer)
    config = make_config(max_model_len=256)
    model = dataclasses.replace(config.model, vision=vision, vocab_size=tokenizer.vocab_size)
    engine = FakeEngine(config=dataclasses.replace(config, model=model))
    engine.tokenizer = tokenizer
    app = create_app(
        client=engine,
        tokenizer=tokenizer,
        intake=Intake(engine.config, tokenizer),
        settings=ServerSettings(),
        processor=ImageProcessor.load(directory, tokenizer, vision, kept_bytes=0),
    )
    return http_client(app), engine


def image(*size: int, seed: int = 0) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(picture(*size, seed=seed)))}}


def text(content: str) -> dict:
    return {"type": "text", "text": content}


MESSAGES = [
    {"role": "user", "content": [image(48, 32), text("and"), image(16, 40, seed=1)]},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": [text("which?"), image(48, 32)]},
]


async def test_the_engine_gets_what_transformers_would_give_its_model(world, tokenizer):
    http, engine = world
    response = await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 4})
    assert response.status_code == 200, response.text
    (request,) = engine.requests
    pictures = [picture(48, 32), picture(16, 40, seed=1), picture(48, 32)]
    plain = [
        {
            "role": m["role"],
            "content": m["content"]
            if isinstance(m["content"], str)
            else [p if p["type"] == "text" else {"type": "image"} for p in m["content"]],
        }
        for m in MESSAGES
    ]
    made = oracle_inputs(FAMILY, tokenizer[0].render_chat(plain), pictures)
    assert list(request.prompt_token_ids) == made["input_ids"][0].tolist()
    first, second, third = request.images
    assert first.key == third.key != second.key
    assert first.tensors == third.tensors
    assert b"".join(i.tensors["pixel_values"].data for i in request.images) == (
        made["pixel_values"].tobytes()
    )
    assert len(request.positions) == 3 * 4 * len(request.prompt_token_ids)
    assert request.position_delta < 0
    usage = response.json()["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids)
    embeds = sum(i.num_embeds for i in request.images)
    assert usage["prompt_tokens_details"]["image_tokens"] == embeds
    counted = await http.post("/tokenize", json={"messages": MESSAGES})
    assert counted.json()["tokens"] == list(request.prompt_token_ids)


class SendingEngine(FakeEngine):
    """Keeps nothing of a request's images, as a client that sends them to a process."""

    async def stream(self, request, *, timeout_s=None):
        request = dataclasses.replace(request, images=())
        async for event in super().stream(request, timeout_s=timeout_s):
            yield event


def images_held() -> set[int]:
    gc.collect()
    return {id(one) for one in gc.get_objects() if type(one) is Array}


async def test_images_are_let_go_once_they_are_sent(world):
    http, engine = world
    engine.__class__ = SendingEngine
    engine.gate = asyncio.Event()
    before = images_held()
    body = {"messages": MESSAGES, "max_tokens": 4}
    task = asyncio.create_task(http.post(CHAT, json=body))
    while not engine.num_open:
        await asyncio.sleep(0.01)
    left = images_held() - before
    engine.gate.set()
    assert (await task).status_code == 200
    assert left == set()


async def test_what_the_model_reads_is_counted_until_the_request_has_ended(world):
    http, engine = world
    budget = http._transport.app.state.context.held_images.budget
    engine.gate = asyncio.Event()
    body = {"messages": MESSAGES, "max_tokens": 4}
    tasks = [asyncio.create_task(http.post(CHAT, json=body)) for _ in range(2)]
    while engine.num_open < 2:
        await asyncio.sleep(0.01)
    images = {one.key: one for request in engine.requests for one in request.images}
    tensors = [array for one in images.values() for array in one.tensors.values()]
    assert len(images) == 2
    assert budget.used == pytest.approx(sum(len(array.data) for array in tensors), rel=0.1)
    engine.gate.set()
    for task in tasks:
        assert (await task).status_code == 200
    assert budget.used == 0
    refused = {"messages": [{"role": "user", "content": [image(9, 9), image(1, 300)]}]}
    for path, asked, status in ((CHAT, refused, 400), ("/tokenize", {"messages": MESSAGES}, 200)):
        assert (await http.post(path, json=asked)).status_code == status
        assert budget.used == 0
    async with http.stream("POST", CHAT, json={**body, "stream": True}) as response:
        await response.aread()
    assert budget.used == 0


def figures(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if "plait:" in line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_metrics_tell_how_images_came_through_and_why_some_did_not(world):
    http, _ = world
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for parts in ([image(), text("?")], [image(1, 300)], [broken], [image()] * 17):
        await http.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    await http.post(CHAT, json={"messages": [{"role": "user", "content": "no image"}]})
    found = figures((await http.get("/metrics")).text)
    assert found["plait:image_preparation_seconds_count"] == 1
    assert found["plait:images_preparing"] == 0
    refused = "plait:image_requests_refused_total"
    assert found[f'{refused}{{code="invalid_image"}}'] == 2
    assert found[f'{refused}{{code="image_too_large"}}'] == 1
    assert found['plait:image_bytes{stage="files"}'] == 0
    documented = re.findall(r"`(plait:\w+)`", (ROOT / "docs/vision.md").read_text())
    assert len(documented) == 12
    exported = {name.partition("{")[0] for name in found}
    for name in documented:
        assert {name, f"{name}_count"} & exported, name


async def test_a_chat_without_images_says_nothing_of_them(world):
    http, engine = world
    body = {"messages": [{"role": "user", "content": "a < b"}], "max_tokens": 4}
    response = await http.post(CHAT, json=body)
    assert "image_tokens" not in response.json()["usage"]["prompt_tokens_details"]
    (request,) = engine.requests
    assert (request.images, request.positions, request.spans) == ((), b"", ())


@pytest.mark.parametrize(
    ("path", "body", "code", "param", "match"),
    [
        (
            CHAT,
            {"messages": [{"role": "user", "content": "<|image_pad|>"}]},
            "invalid_value",
            "messages[0].content",
            "stands for an image",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [text("<|image_pad|>"), image(9, 9)]}]},
            "invalid_value",
            "messages[0].content[0].text",
            "stands for an image",
        ),
        (
            "/v1/completions",
            {"prompt": "see <|image_pad|>"},
            "invalid_value",
            "prompt",
            "stands for images",
        ),
        (
            CHAT,
            {"messages": MESSAGES, "truncate_prompt_tokens": 9},
            "invalid_value",
            "truncate_prompt_tokens",
            "could cut an image",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [image(64, 64)] * 5}]},
            "context_length_exceeded",
            "messages",
            "the images take 320 tokens, and the prompt may have 255: image 1 takes 64",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [image(9, 9), image(64, 64)]}],
             "max_tokens": 200},
            "context_length_exceeded",
            "messages",
            "image 2 takes 64",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [text("x" * 200), image(64, 64)]}]},
            "context_length_exceeded",
            "messages",
            "(64 of them for images)",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [image(9, 9), image(1, 300)]}]},
            "invalid_image",
            "messages[0].content[1].image_url",
            "messages[0].content[1].image_url: this model cannot take an image of 1 × 300",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_before_the_engine(world, path, body, code, param, match):
    http, engine = world
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert match in error["message"]
    assert engine.requests == []
