"""`plait serve` as users meet it: the command, its two processes, and real clients."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from support.server_process import MODEL, gauge, serving, until_idle
from support.tiny_models import make_checkpoint

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is asked of it may take seconds, so that a machine which stalls sees it run."""
    return make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=40_000
    )


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with serving(model, "--max-num-queued-reqs", "400") as (address, _):
        yield address


async def test_two_hundred_concurrent_streams_complete(url: str) -> None:
    """And each gets the text that it gets alone."""
    prompts = [f"Story number {i}:" for i in range(200)]
    limits = httpx.Limits(max_connections=None)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(limits=limits, timeout=300),
    ) as client:

        async def ask(prompt: str) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=16, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

        together = await asyncio.gather(*map(ask, prompts))
        for i in range(0, 200, 40):
            assert await ask(prompts[i]) == together[i]
    await until_idle(url)


async def test_clients_that_go_away_leave_nothing_behind(url: str) -> None:
    body = {"model": MODEL, "prompt": "On and on", "max_tokens": 30_000, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for stream in (True, False):
            tasks = [
                asyncio.create_task(
                    client.post("/v1/completions", json={**body, "stream": stream, "seed": i})
                )
                for i in range(8)
            ]
            async with asyncio.timeout(30):
                while gauge(url, "vllm:num_requests_running") < 8:
                    await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until_idle(url)


def test_langchain_talks_to_it(url: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=12
    )
    whole = chat.invoke("Hello")
    assert "".join(str(chunk.content) for chunk in chat.stream("Hello")) == whole.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] > 0


async def test_overload_answers_503_at_once_and_finishes_what_it_took(model: Path) -> None:
    flags = ("--max-num-seqs", "4", "--max-num-queued-reqs", "4")
    body = {"model": MODEL, "prompt": "On", "max_tokens": 1000, "ignore_eos": True}
    with serving(model, *flags) as (address, _):
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for _ in range(32))
            )
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 503}
        assert codes.count(200) >= 8
        for answer in answers:
            if answer.status_code == 503:
                assert float(answer.headers["retry-after"]) > 0
                assert answer.json()["error"]["code"] == "overloaded"
            else:
                assert answer.json()["usage"]["completion_tokens"] == 1000
        await until_idle(address)


async def test_sigterm_lets_running_answers_end(model: Path) -> None:
    body = {"model": MODEL, "prompt": "On", "max_tokens": 3000, "ignore_eos": True}
    with serving(model) as (address, process):
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            async with asyncio.timeout(30):
                while gauge(address, "vllm:num_requests_running") < 1:
                    await asyncio.sleep(0.01)
            os.kill(process.pid, signal.SIGTERM)
            answer = await running
        assert answer.json()["usage"]["completion_tokens"] == 3000
        assert process.wait(60) == 0
