"""`plait serve` with images: many at once, shared, broken and abandoned ones among them."""

import asyncio
import random

import httpx
import pytest
from support.images import data_url, encoded, picture
from support.seeing import make_seeing_checkpoint
from support.server_process import MODEL, gauge, image_bytes, serving, until_idle

pytestmark = pytest.mark.anyio
NUM_IMAGES, NUM_REQUESTS = 8, 60
FLAGS = (
    *("--dtype", "float32", "--encoder-cache-memory", "24KiB"),
    *("--max-num-seqs", "8", "--max-num-queued-reqs", "100"),
)


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seeing")
    make_seeing_checkpoint("qwen2_vl", directory)
    with serving(directory, *FLAGS) as (url, _):
        yield url


def image(number):
    sizes = ((48, 32), (20, 60), (64, 64), (9, 9))
    made = encoded(picture(*sizes[number % 4], seed=number), ("PNG", "JPEG")[number % 2])
    return {"type": "image_url", "image_url": {"url": data_url(made)}}


def body(*numbers, **more):
    content = [image(number) for number in numbers] + [{"type": "text", "text": "what?"}]
    fields = {"model": MODEL, "max_tokens": 6, "temperature": 0, **more}
    return {**fields, "messages": [{"role": "user", "content": content}]}


async def ask(client, asked):
    response = await client.post("/v1/chat/completions", json=asked)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


async def leave(client, asked, after_s):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s):
            await ask(client, {**asked, "max_tokens": 300, "ignore_eos": True})


async def test_many_requests_that_share_images_are_answered_as_alone_and_leave_nothing(url):
    rng = random.Random(0)
    sets = [(rng.randrange(NUM_IMAGES),) for _ in range(NUM_IMAGES)]
    sets += [(0, 1), (1, 0), (2, 2), (3, 4, 5)]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        alone = {numbers: await ask(client, body(*numbers)) for numbers in dict.fromkeys(sets)}
        assert len(set(alone.values())) > 1
        for salted in (False, True):
            chosen = [rng.choice(sets) for _ in range(NUM_REQUESTS)]
            salts = [{"cache_salt": str(i % 3)} if salted else {} for i in range(NUM_REQUESTS)]
            works = [ask(client, body(*n, **s)) for n, s in zip(chosen, salts, strict=True)]
            doomed = [leave(client, body(*rng.choice(sets)), rng.random() / 4) for _ in range(9)]
            broken = client.post("/v1/chat/completions", json=broken_body())
            found, refused, _ = await asyncio.gather(
                asyncio.gather(*works), broken, asyncio.gather(*doomed)
            )
            assert found == [alone[numbers] for numbers in chosen]
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "invalid_image"
    await until_idle(url)
    assert gauge(url, "plait:images_preparing") == 0
    held = image_bytes(url)
    assert held.pop("processed") > 0
    assert set(held.values()) == {0.0}
    assert 0 < gauge(url, "plait:encoder_cache_bytes") <= 24 << 10
    assert gauge(url, "plait:encoder_cache_evictions_total") > 0


def broken_body():
    asked = body(0)
    cut = data_url(encoded(picture(48, 32))[:-30])
    asked["messages"][0]["content"][0]["image_url"]["url"] = cut
    return asked
