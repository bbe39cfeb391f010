"""The engine in its own process: streams, aborts, refusals, death and restart."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny_models import make_checkpoint

from plait.platform.config import Options
from plait.platform.core import Event, FinishReason, Request, SamplingParams
from plait.platform.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    InternalError,
    ModelUnsupported,
    Overloaded,
)
from plait.platform.server.process import ProcessClient
from plait.platform.server.supervisor import Supervisor

pytestmark = pytest.mark.anyio

# Seconds of work: what is to happen while it runs does, on a machine that stalls for some, too.
LONG = SamplingParams(temperature=0.0, max_tokens=30_000, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    model = make_checkpoint(
        "llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=LONG.max_tokens + 1000
    )
    return Options(
        model=str(model),
        kv_cache_bytes=64 << 20,
        max_num_seqs=8,
        max_num_queued_reqs=2,
        num_threads=1,
        progress=False,
    )


@pytest.fixture(scope="module")
async def client(options: Options) -> AsyncIterator[ProcessClient]:
    """One engine for all that leave it serving; starting one takes seconds."""
    started = await ProcessClient.start(options, hang_s=5.0)
    yield started
    await started.close()


@pytest.fixture
async def last_client(options: Options) -> AsyncIterator[ProcessClient]:
    """One to be drained."""
    started = await ProcessClient.start(options)
    yield started
    await started.close()


def request(name: str, params: SamplingParams = LONG) -> Request:
    return Request(request_id=name, prompt_token_ids=(5, 6, 7), params=params)


async def collect(client: ProcessClient, asked: Request, **rest: float) -> list[Event]:
    return [event async for event in client.stream(asked, **rest)]


async def begin(client: ProcessClient, asked: Request) -> asyncio.Task[list[Event]]:
    """Collect in the background; returns once the engine works on it."""
    began = asyncio.Event()

    async def run() -> list[Event]:
        events = []
        async for event in client.stream(asked):
            events.append(event)
            began.set()
        return events

    task = asyncio.create_task(run())
    async with asyncio.timeout(30):
        await began.wait()
    return task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_the_machine_gives_is_probed_once_the_engine_is_idle(
    client: ProcessClient,
) -> None:
    assert "probe machine" not in client.phases
    await until(lambda: "probe" in client.facts)
    rates = client.facts["probe"]
    assert isinstance(rates, dict)
    assert rates["read"] > 0


async def test_streams_refusals_and_aborts(client: ProcessClient) -> None:
    assert client.ready
    assert client.healthy
    assert client.unhealthy_reason == ""
    short = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, n=2)
    events = await collect(client, request("short", short))
    assert sorted(e.index for e in events if e.finish_reason is FinishReason.LENGTH) == [0, 1]
    assert sum(len(e.token_ids) for e in events) == 10

    # Leaving a stream gives its blocks back.
    stream = client.stream(request("left"))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: client.stats.num_running == 0 and client.stats.kv_usage == 0)

    # A cancelled reader does, too.
    task = await begin(client, request("cancelled"))
    task.cancel()
    await until(lambda: client.stats.num_running == 0 and client.stats.kv_usage == 0)

    with pytest.raises(DeadlineExceeded):
        await collect(client, request("late"), timeout_s=0.05)

    # 8 run, 2 wait, and the next is refused while those go on.
    running = [await begin(client, request(f"running-{i}")) for i in range(8)]
    waiting = [
        asyncio.create_task(collect(client, request(f"waiting-{i}", SHORT))) for i in range(2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await collect(client, request("too-many"))
    num_steps = client.stats.num_steps
    await until(lambda: client.stats.num_steps > num_steps + 20)
    assert not any(task.done() for task in (*running, *waiting))
    for task in running:
        task.cancel()
    for events in await asyncio.gather(*waiting):
        assert events[-1].finish_reason is FinishReason.LENGTH
    await until(lambda: client.stats.num_running == 0 and client.stats.kv_usage == 0)


async def test_an_answer_that_fails_ends_its_siblings(client: ProcessClient) -> None:
    stream = client.stream(request("some", replace(LONG, n=4)))
    async for _ in stream:
        break
    fault = Event(
        request_id="some", index=2, finish_reason=FinishReason.ERROR, error=("invalid_value", "no")
    )
    client._supervisor.requests.deliver([fault])
    with pytest.raises(BadRequest, match="no"):
        async for _ in stream:
            pass
    num_steps = client.stats.num_steps
    await until(lambda: client.stats.num_running == 0 and client.stats.kv_usage == 0)
    assert client.stats.num_steps < num_steps + LONG.max_tokens // 2  # and not at their ends


async def test_a_killed_engine_fails_what_ran_and_comes_back(client: ProcessClient) -> None:
    task = await begin(client, request("running"))
    assert client.engine_pid is not None
    os.kill(client.engine_pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="signal 9"):
        await task
    assert not client.ready
    assert "restarting" in client.unhealthy_reason
    await until(lambda: client.ready)
    assert (await collect(client, request("after", SHORT)))[-1].finish_reason is FinishReason.LENGTH


async def test_a_hung_engine_is_seen_and_replaced(client: ProcessClient) -> None:
    task = await begin(client, request("running"))
    assert client.engine_pid is not None
    hung = client.engine_pid
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(EngineDied, match="hung"):
        await task
    await until(lambda: client.ready)
    assert client.engine_pid != hung


async def test_a_drain_lets_requests_end_and_takes_no_new_ones(last_client: ProcessClient) -> None:
    task = await begin(last_client, request("running", SHORT))
    drain = asyncio.create_task(last_client.drain(30.0))
    await until(lambda: not last_client.ready)
    with pytest.raises(Overloaded, match="shutting down"):
        await collect(last_client, request("new"))
    assert (await task)[-1].finish_reason is FinishReason.LENGTH
    await drain


async def test_a_drain_that_runs_out_of_time_aborts(last_client: ProcessClient) -> None:
    task = await begin(last_client, request("running"))
    await last_client.drain(0.0)
    assert (await task)[-1].finish_reason is FinishReason.ABORT


async def test_a_start_that_fails_says_why(options: Options, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file or directory"):
        await ProcessClient.start(Options(model=str(tmp_path / "nothing.gguf")))
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        await ProcessClient.start(Options(model=str(tmp_path)))


async def test_nothing_waits_for_an_engine_that_is_gone(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket without a peer takes no message: sending must fail, not wait."""

    async def never(self: Supervisor) -> bool:
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr(Supervisor, "_restart", never)
    assert client.engine_pid is not None
    os.kill(client.engine_pid, signal.SIGKILL)
    await until(lambda: not client.ready)
    async with asyncio.timeout(10):
        # As in the moment before its end is seen.
        monkeypatch.setattr(client._supervisor, "reason", "")
        with pytest.raises(EngineDied):
            await collect(client, request("late"))
        await client.drain(0.1)
        await client.close()


async def test_an_engine_that_dies_before_it_connects_is_an_error(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    async with asyncio.timeout(10):
        with pytest.raises(InternalError, match="ended with status 1 while starting"):
            await ProcessClient.start(options)
