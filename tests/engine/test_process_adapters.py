"""Adapters across the socket: loaded, refused, used, pinned, and there again after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.peft_adapters import make_adapter

from plait.adapters.info import AdapterInfo, AdapterLevel
from plait.platform.config import Options
from plait.platform.core import AdapterUse, Request, SamplingParams
from plait.platform.errors import AdapterStorageFailed, InvalidAdapter
from plait.platform.server.process import ProcessClient

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def client(checkpoint: Callable[[str], Path]) -> AsyncIterator[ProcessClient]:
    options = Options(
        model=str(checkpoint("llama")),
        dtype="float32",
        kv_cache_bytes=16 << 20,
        adapter_memory_bytes=4 << 20,
        num_threads=1,
        progress=False,
    )
    started = await ProcessClient.start(options)
    yield started
    await started.close()


async def answer(client: ProcessClient, name: str, *infos: AdapterInfo) -> list[int]:
    request = Request(
        request_id=name,
        prompt_token_ids=(5, 6, 7, 8),
        params=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        adapters=tuple(
            AdapterUse(generation=info.generation, kv_digest=info.kv_digest) for info in infos
        ),
    )
    return [token async for event in client.stream(request) for token in event.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_an_adapter_is_served_and_survives_the_engine(
    client: ProcessClient, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = make_adapter(
        checkpoint("llama"), tmp_path / "a", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]
    )
    info = await client.load_adapter("a" * 64, str(path))
    with_adapter, base = await asyncio.gather(answer(client, "a", info), answer(client, "base"))
    assert len(with_adapter) == len(base) == 12
    assert with_adapter != base
    await client.pin_adapter(info.generation, pinned=True)
    states = lambda: client.adapter_states.get(info.generation)  # noqa: E731
    await until(lambda: (state := states()) is not None and state.pinned)
    assert client.adapter_states[info.generation].level == AdapterLevel.DEVICE

    (tmp_path / "broken").mkdir()
    with pytest.raises(InvalidAdapter):
        await client.load_adapter("b" * 64, str(tmp_path / "broken"))
    assert await answer(client, "still base") == base

    assert client.engine_pid is not None
    os.kill(client.engine_pid, signal.SIGKILL)
    await until(lambda: not client.ready)
    await until(lambda: client.ready)
    assert await answer(client, "again", info) == with_adapter
    await client.drop_adapter(info.generation)
    await until(lambda: info.generation not in client.adapter_states)


async def test_what_a_new_engine_cannot_read_is_lost_until_it_can(
    client: ProcessClient,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plait.platform.server.adapters.engine_side.RETRY_S", 0.05)
    path = make_adapter(checkpoint("llama"), tmp_path / "a", r=4, target_modules=["v_proj"])
    info = await client.load_adapter("c" * 64, str(path))
    wanted = await answer(client, "first", info)
    path.rename(tmp_path / "away")
    assert client.engine_pid is not None
    os.kill(client.engine_pid, signal.SIGKILL)
    await until(lambda: not client.ready)
    await until(lambda: client.ready)
    with pytest.raises(AdapterStorageFailed, match="retry"):
        await answer(client, "second", info)
    assert client.adapter_states[info.generation].level == AdapterLevel.LOST
    assert len(await answer(client, "base")) == 12
    (tmp_path / "away").rename(path)
    async with asyncio.timeout(60):
        while True:
            try:
                assert await answer(client, "third", info) == wanted
                break
            except AdapterStorageFailed:
                await asyncio.sleep(0.01)
    await client.drop_adapter(info.generation)
