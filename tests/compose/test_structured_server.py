"""Constraints and tools of a real server, through the clients that people use."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from support.server_process import MODEL, serving
from support.tiny_models import make_checkpoint

pytestmark = pytest.mark.anyio


class City(pydantic.BaseModel):
    """Small enough that a random model ends it."""

    name: str = pydantic.Field(max_length=6)
    size: Literal["small", "large"]
    visits: int = pydantic.Field(ge=0, le=99)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "day": {"type": "boolean"}},
            "required": ["unit", "day"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The context has room for what tells a model of its tools, at a byte or two a token."""
    folder = tmp_path_factory.mktemp("llama")
    with serving(make_checkpoint("llama", folder, max_position_embeddings=2048)) as (address, _):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_parses_into_pydantic_models(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=City, seed=seed, max_tokens=120
        )
        (choice,) = answer.choices
        assert isinstance(choice.message.parsed, City)
        assert choice.finish_reason == "stop"
        assert answer.usage.completion_tokens_details.model_extra["forced_tokens"] > 0


def test_required_and_named_tools_are_called_streamed_and_whole(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        options = {
            "model": MODEL,
            "messages": MESSAGES,
            "tools": [WEATHER],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "seed": 7,
        }
        whole = client.chat.completions.create(**options).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        (call,) = whole.message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"unit", "day"}
        with client.chat.completions.stream(**options) as stream:
            streamed = stream.get_final_completion().choices[0]
        (again,) = streamed.message.tool_calls
        assert again.function.arguments == call.function.arguments
        assert streamed.finish_reason == "tool_calls"


def test_langchain_gets_structured_output_and_binds_tools(url: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, max_tokens=200, seed=3)
    for method in ("json_schema", "function_calling"):
        city = chat.with_structured_output(City, method=method).invoke("Hello")
        assert isinstance(city, City), method
    bound = chat.bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke("Hello").tool_calls
    assert call["name"] == "get_weather"
    gathered = None
    for chunk in bound.stream("Hello"):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.tool_calls[0]["args"] == call["args"]


# Cheap to send, minutes to compile.
BOMB = "root ::= " + " ".join(f"[a-z]{{0,{1500 + i}}}" for i in range(20))


async def test_a_compile_bomb_costs_one_400_while_other_streams_go_on(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        body = {"model": MODEL, "prompt": "On", "max_tokens": 200, "ignore_eos": True}

        async def stream() -> float:
            """The longest silence, in seconds."""
            longest, last = 0.0, time.monotonic()
            request = client.stream("POST", "/v1/completions", json=body | {"stream": True})
            async with request as response:
                async for _ in response.aiter_lines():
                    now = time.monotonic()
                    longest, last = max(longest, now - last), now
            return longest

        async def explode() -> httpx.Response:
            return await client.post(
                "/v1/completions", json=body | {"ignore_eos": False, "guided_grammar": BOMB}
            )

        alone = await stream()
        first, second, answer = await asyncio.gather(stream(), stream(), explode())
        assert answer.status_code == 400, answer.text
        # The compiler is another process, and took its whole limit of two seconds.
        assert max(first, second) < max(1.0, 20 * alone)
        assert answer.json()["error"]["code"] == "grammar_too_complex"
        # The next grammar is compiled, and others' requests were never touched.
        good = await client.post(
            "/v1/completions", json=body | {"ignore_eos": False, "guided_choice": ["yes", "no"]}
        )
        assert good.json()["choices"][0]["text"] in ("yes", "no")
