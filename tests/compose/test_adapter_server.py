"""Adapters of a real server: replaced under streams, kept over an engine's death, pushed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from safetensors.torch import save
from support.server_process import MODEL, gauge, serving, until_idle
from support.small_adapters import CONFIG, make_tensors, write_small_adapter

from plait import LLM, SamplingParams

pytestmark = pytest.mark.anyio
ADMIN = {"authorization": "Bearer boss"}
NUM_STREAMS, NUM_TOKENS = 32, 40
PROMPTS = [
    f"The quick brown fox number {i} jumps over the lazy dog and" for i in range(NUM_STREAMS)
]
PLAIT = str(Path(sys.executable).with_name("plait"))
Server = tuple[str, "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2):
        write_small_adapter(directory / f"v{seed}", seed)
    return directory


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[[str], Path], folder: Path) -> dict[str | None, list[str]]:
    """What each version, and the base, says to each prompt, each alone and offline."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    adapters = {name: folder / name for name in ("v1", "v2")}
    path = str(checkpoint("llama"))
    with LLM(path, kv_cache_bytes=8 << 20, num_threads=1, adapters=adapters) as llm:
        return {
            name: [o.outputs[0].text for o in llm.generate(PROMPTS, params, adapter=name)]
            for name in (None, "v1", "v2")
        }


@pytest.fixture(scope="module")
def server(checkpoint: Callable[[str], Path], folder: Path) -> Iterator[Server]:
    flags = ("--admin-key", "boss", "--adapter-dir", str(folder), "--adapters", f"v1={folder}/v1")
    with serving(checkpoint("llama"), *flags) as started:
        yield started


def load(url: str, name: str, path: str, **fields: Any) -> str:
    body = {"lora_name": name, "lora_path": path} | fields
    answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=ADMIN, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["generation"])


def client_of(url: str) -> openai.AsyncOpenAI:
    limits = httpx.Limits(max_connections=None)
    http = httpx.AsyncClient(limits=limits, timeout=120)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str) -> tuple[str, str | None]:
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return answer.choices[0].text, getattr(answer, "adapter_generation", None)


async def test_replacing_under_streams_leaves_each_wholly_of_one_generation(
    server: Server, answers: dict[str | None, list[str]]
) -> None:
    url, _ = server
    first = load(url, "live", "v1")
    begun = [asyncio.Event() for _ in PROMPTS]
    async with client_of(url) as client:

        async def stream(i: int) -> tuple[str, set[str]]:
            chunks = await client.completions.create(
                model="live",
                prompt=PROMPTS[i],
                max_tokens=NUM_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text, generations = "", set()
            async for chunk in chunks:
                begun[i].set()
                generations.add(chunk.adapter_generation)  # type: ignore[attr-defined]
                text += chunk.choices[0].text
            return text, generations

        streams = [asyncio.create_task(stream(i)) for i in range(NUM_STREAMS)]
        await asyncio.wait_for(begun[0].wait(), 60)
        wish = {"load_inplace": True, "expected_generation": first}
        second = await asyncio.to_thread(load, url, "live", "v2", **wish)
        later = await asyncio.gather(*(ask(client, "live", prompt) for prompt in PROMPTS[:8]))
        assert later == [(text, second) for text in answers["v2"][:8]]
        seen = set()
        for i, (text, generations) in enumerate(await asyncio.gather(*streams)):
            (generation,) = generations
            seen.add(generation)
            assert text == answers["v1" if generation == first else "v2"][i]
        assert first in seen
        base = await asyncio.gather(*(ask(client, MODEL, prompt) for prompt in PROMPTS[:8]))
        assert base == [(text, None) for text in answers[None][:8]]
        # The same prompts are in the prefix cache by now, under each generation.
        assert await ask(client, "live", PROMPTS[0]) == (answers["v2"][0], second)
        assert await ask(client, "v1", PROMPTS[0]) == (answers["v1"][0], first)
    await until_idle(url)


async def test_an_engine_that_is_started_anew_has_its_adapters(
    server: Server, answers: dict[str | None, list[str]]
) -> None:
    url, process = server
    load(url, "kept", "v2", pinned=True)
    (engine,) = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "plait.platform.engine_process" in child.cmdline()
    ]
    os.kill(engine.pid, signal.SIGKILL)
    async with client_of(url) as client, asyncio.timeout(60):
        while httpx.get(f"{url}/ready").status_code == 200:
            await asyncio.sleep(0.02)
        while httpx.get(f"{url}/ready").status_code != 200:
            await asyncio.sleep(0.1)
        for model, version in (("kept", "v2"), ("v1", "v1"), (MODEL, None)):
            assert (await ask(client, model, PROMPTS[1]))[0] == answers[version][1]


async def test_tensors_are_pushed_and_an_adapter_of_the_folder_comes_when_it_is_asked_for(
    server: Server, answers: dict[str | None, list[str]]
) -> None:
    url, _ = server
    answer = httpx.post(
        f"{url}/load_lora_adapter_from_tensors",
        params={"lora_name": "pushed", "config": json.dumps(CONFIG)},
        content=save(make_tensors(2)),
        headers={"content-type": "application/octet-stream", **ADMIN},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    async with client_of(url) as client:
        assert await ask(client, "pushed", PROMPTS[2]) == (
            answers["v2"][2],
            answer.json()["generation"],
        )
        assert (await ask(client, "v2", PROMPTS[3]))[0] == answers["v2"][3]
        models = [model.id for model in (await client.models.list()).data]
        assert {MODEL, "v1", "v2", "pushed"} <= set(models)
    assert gauge(url, "plait:adapter_requests_total") > 0


async def test_a_server_whose_adapter_does_not_fit_ends_with_the_cause(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    command = [PLAIT, "serve", str(checkpoint("llama")), "--port", "0", "--adapters"]
    command += [f"x={tmp_path}", "--kv-cache-memory", "8MiB", "--threads", "1"]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "adapter x: adapter_model.safetensors is missing" in done.stderr
