"""The default server with 64 requests of all kinds at once, streamed and not, some of them left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.http_app import sse_events
from support.server_process import gauge, image_bytes, serving, until_idle

from plait.platform.demo import questions

pytestmark = pytest.mark.anyio
NUM_REQUESTS, NUM_LEAVING = 64, 16
Body = dict[str, Any]
Choices = list[tuple[str, list[Any], str]]  # content, tool calls, finish reason

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "fields", "schema": questions.FIELDS, "strict": True},
}
ENDS = (  # what is asked for beside the question
    {"temperature": 0},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.8, "top_p": 0.9, "stop": ["."]},
    {"temperature": 0, "frequency_penalty": 0.5, "min_tokens": 5},
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(None, "--max-num-seqs", "24", "--max-num-queued-reqs", "200") as (url, _):
        yield url


def kinds(base: str) -> list[Body]:
    """One request of each kind."""
    shown = {"url": questions.data_url(questions.squares(3, "red"))}
    looked = [
        {"type": "image_url", "image_url": shown},
        {"type": "text", "text": questions.DESCRIBE},
    ]
    form = {"structured_outputs": {"regex": r"(Mon|Tues|Fri)day, \d\d:[0-5]0"}}
    asked: list[tuple[str, Any, Body]] = [
        (base, questions.CHATS[0], {}),
        (base, questions.COPY, {}),
        (base, "When do we meet?", form),
        (base, "How is Rome?", {"tools": [WEATHER], "tool_choice": "required"}),
        ("sql", questions.query(), {}),
        ("tone", questions.blunt(), {}),
        ("fields", questions.message(), {"response_format": SCHEMA}),
        ("sight", looked, {}),
        ("sight", looked, {"structured_outputs": {"json": questions.PICTURE}}),
    ]
    return [
        {"model": model, "messages": [{"role": "user", "content": content}], **more}
        for model, content, more in asked
    ]


def requests(base: str) -> list[Body]:
    """Every kind with every end, none twice."""
    bodies = kinds(base)
    return [
        {**bodies[i % len(bodies)], **ENDS[i % len(ENDS)], "max_tokens": 24, "seed": i}
        for i in range(NUM_REQUESTS)
    ]


async def answer(client: httpx.AsyncClient, body: Body) -> Choices:
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return [
        (
            choice["message"]["content"] or "",
            [call["function"] for call in choice["message"].get("tool_calls") or []],
            choice["finish_reason"],
        )
        for choice in response.json()["choices"]
    ]


async def streamed(client: httpx.AsyncClient, body: Body) -> Choices:
    """The same, put together from what a stream brings."""
    count = body.get("n", 1)
    texts, ends = [""] * count, [""] * count
    calls: list[dict[int, Any]] = [{} for _ in range(count)]
    response = await client.post("/v1/chat/completions", json=body | {"stream": True})
    assert response.status_code == 200
    *events, end = sse_events(response.content)
    assert end == "[DONE]"
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            at, delta = choice["index"], choice["delta"]
            texts[at] += delta.get("content") or ""
            ends[at] = choice["finish_reason"] or ends[at]
            for part in delta.get("tool_calls") or []:
                call = calls[at].setdefault(part["index"], {"name": "", "arguments": ""})
                for field, text in part["function"].items():
                    call[field] += text or ""
    return [(texts[i], list(calls[i].values()), ends[i]) for i in range(count)]


async def leave(client: httpx.AsyncClient, body: Body, after_s: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after_s):
            await streamed(client, body | {"max_tokens": 400, "ignore_eos": True, "stop": None})


async def test_64_requests_at_once_are_answered_as_alone_without_drafts_and_leave_nothing(
    url: str,
) -> None:
    rng = random.Random(0)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        base = (await client.get("/v1/models")).json()["data"][0]["id"]
        bodies = requests(base)
        alone = [
            await answer(client, body | {"speculation": {"enabled": False}}) for body in bodies
        ]
        assert gauge(url, "plait:draft_tokens_total") == 0
        works = [(answer, streamed)[i % 2](client, body) for i, body in enumerate(bodies)]
        free = [body for body in bodies if len(body) == len(bodies[0])]
        leaving = [leave(client, rng.choice(free), 0.2 + rng.random()) for _ in range(NUM_LEAVING)]
        found, _ = await asyncio.gather(asyncio.gather(*works), asyncio.gather(*leaving))
    assert [i for i in range(NUM_REQUESTS) if found[i] != alone[i]] == []
    assert gauge(url, "plait:draft_tokens_total") > 0
    await until_idle(url)
    check_nothing_is_left(url)


def check_nothing_is_left(url: str) -> None:
    assert gauge(url, "plait:images_preparing") == 0
    assert gauge(url, "vllm:num_requests_waiting") == 0
    held = image_bytes(url)
    held.pop("processed")  # kept on purpose
    assert set(held.values()) == {0.0}
