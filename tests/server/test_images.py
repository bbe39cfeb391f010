"""Image parts over HTTP, up to where a model that sees would take them."""

import dataclasses

import pytest
from support.http_app import http_client, make_app
from support.images import data_url, encoded, picture

from plait.platform.cli import table
from plait.platform.cli.settings import server_settings
from plait.platform.cli.sources import resolve
from plait.platform.config import VisionInfo
from plait.platform.errors import ConfigError
from plait.platform.server import prompts
from plait.platform.server.schemas import ChatTemplating
from plait.platform.server.settings import IMAGE_PATHS, Limits, ServerSettings
from plait.vision.limits import ImageLimits
from plait.vision.parts import PartReader

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
VISION = VisionInfo(
    family="fake", hidden_size=8, num_levels=1, image_token_id=3, has_grid_positions=False
)


def image(url: str = "", **more: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url or data_url(encoded(picture())), **more}}


def asked(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, *parts]}]}


@pytest.fixture
def seeing(engine):
    """The fake engine, with a model that takes images."""
    model = dataclasses.replace(engine.config.model, vision=VISION)
    engine.config = dataclasses.replace(engine.config, model=model)
    return engine


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_model_without_eyes_is_named(http, engine, path):
    response = await http.post(path, json=asked(image()))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported")
    assert f"{engine.config.model.name} takes no images" in error["message"]
    assert error["param"] == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("parts", "param", "match"),
    [
        ([image("file:///etc/passwd")], "messages[0].content[1]", "file:"),
        ([image(detail="most")], "messages[0].content[1].image_url.detail", "auto, high, low"),
        ([image()] * 3, "messages[0].content[3]", "more than 2 images (--max-images)"),
        ([{"type": "video_url", "video_url": {}}], "messages[0].content[1]", "video_url"),
        ([{"type": "input_audio"}], "messages[0].content[1]", "input_audio"),
    ],
)
async def test_wrong_parts_are_refused_with_their_place(seeing, parts, param, match):
    async with http_client(make_app(seeing, limits=Limits(images=2))) as http:
        response = await http.post(CHAT, json=asked(*parts))
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert match in error["message"]


async def test_images_of_all_turns_come_in_order_and_leave_marks_for_the_template():
    url = data_url(encoded(picture()))
    messages = [
        {"role": "user", "content": [image(url), {"type": "text", "text": "a"}, image(url)]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [image(url, detail="low")]},
    ]
    reader = PartReader(model="eyes", takes_images=True, max_images=9)
    body = ChatTemplating.model_validate({"messages": messages})
    plain = prompts.check_chat(body, reader)
    assert [m["content"] for m in plain] == [
        [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}],
        "b",
        [{"type": "image"}],
    ]
    assert [(one.at, one.detail) for one in reader.images] == [
        ("messages[0].content[0].image_url", "auto"),
        ("messages[0].content[2].image_url", "auto"),
        ("messages[2].content[0].image_url", "low"),
    ]


async def test_only_chats_of_a_model_that_sees_may_have_large_bodies(engine, seeing):
    limits = Limits(body_bytes=2000, image_body_bytes=8000)
    body = asked(image("data:," + "x" * 4000))
    async with http_client(make_app(seeing, limits=limits)) as http:
        assert (await http.post(CHAT, json=body)).status_code == 400  # it was read
        assert (await http.post("/v1/completions", json=body)).status_code == 413
        large = asked(image("data:," + "x" * 8000))
        assert (await http.post(CHAT, json=large)).status_code == 413
    model = dataclasses.replace(seeing.config.model, vision=None)
    seeing.config = dataclasses.replace(seeing.config, model=model)
    async with http_client(make_app(seeing, limits=limits)) as http:
        assert (await http.post(CHAT, json=body)).status_code == 413


async def test_the_largest_body_holds_the_largest_images():
    limits = Limits()
    assert limits.image_body_bytes >= limits.for_images().body_bytes
    assert limits.for_images() == ImageLimits()
    large = Limits(image_bytes=100 << 20, image_pixels=100_000_000).for_images()
    assert large.request_bytes == 100 << 20
    assert ServerSettings().body_bytes("/v1/completions", takes_images=True) == limits.body_bytes
    assert CHAT in IMAGE_PATHS


async def test_a_host_that_is_none_ends_the_start():
    flags = resolve(
        table.SERVE, table.KNOWN, given={"allow_media_url": ["h", "no host"]}, environ={}, file=None
    )
    with pytest.raises(ConfigError, match="write HOST"):
        server_settings(flags)
