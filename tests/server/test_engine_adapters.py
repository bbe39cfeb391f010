"""What the server tells an engine of adapters, and a new engine again."""

import asyncio

import pytest
from support.fake_engine import make_info

from plait.adapters.info import AdapterLevel, AdapterState, LoadReport
from plait.platform.errors import (
    AdapterBytesExceeded,
    AdapterRankExceeded,
    AdapterStorageFailed,
    EngineDied,
    InvalidAdapter,
)
from plait.platform.messages import (
    AdapterLoaded,
    AdapterStates,
    DropAdapter,
    LoadAdapter,
    PinAdapter,
)
from plait.platform.server.adapters.engine_side import EngineAdapters

pytestmark = pytest.mark.anyio
LOAD = LoadAdapter(generation="g", directory="/store/g", allow_zero_delta=True)


PINNED = LoadAdapter(generation="g", directory="/store/g", pinned=True, allow_zero_delta=True)
FULL = (AdapterBytesExceeded.code, "pinning does not fit")


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def sent():
    return []


@pytest.fixture
def adapters(sent):
    async def send(message):
        sent.append(message)

    return EngineAdapters(send)


async def loaded(adapters, message=LOAD):
    loading = asyncio.create_task(adapters.load(message))
    await asyncio.sleep(0)
    adapters.take(AdapterLoaded(generation=message.generation, info=make_info(message.generation)))
    return await loading


async def pinned(adapters, **answer):
    pinning = asyncio.create_task(adapters.pin("g", pinned=True))
    await asyncio.sleep(0)
    adapters.take(AdapterLoaded(generation="g", **(answer or {"info": make_info("g")})))
    return await pinning


async def test_equal_loads_at_a_time_are_one_and_a_later_one_is_none(adapters, sent):
    both = asyncio.gather(adapters.load(LOAD), adapters.load(LOAD))
    await asyncio.sleep(0)
    adapters.take(AdapterLoaded(generation="g", info=make_info("g")))
    assert await both == [make_info("g")] * 2
    assert await adapters.load(LOAD) == make_info("g")
    assert sent == [LOAD]


async def test_a_refusal_keeps_code_and_report(adapters, sent):
    loading = asyncio.create_task(adapters.load(LOAD))
    await asyncio.sleep(0)
    report = LoadReport(num_tensors=3)
    error = ("lora_rank_limit_exceeded", "rank 512")
    adapters.take(AdapterLoaded(generation="g", error=error, report=report))
    with pytest.raises(AdapterRankExceeded, match="rank 512") as refused:
        await loading
    assert refused.value.report == report
    await adapters.send_again()
    assert sent == [LOAD]


async def test_a_new_engine_gets_what_is_still_wanted_as_it_is_wanted_now(adapters, sent):
    await loaded(adapters)
    await loaded(adapters, LoadAdapter(generation="h", directory="/store/h"))
    await pinned(adapters)
    await adapters.pin("g", pinned=True)
    await adapters.drop("h")
    assert sent[2:] == [PINNED, DropAdapter(generation="h")]
    adapters.take(AdapterStates(states={"g": AdapterState(level="device")}))
    loading = asyncio.create_task(adapters.load(LoadAdapter(generation="i", directory="/store/i")))
    await asyncio.sleep(0)
    adapters.engine_ended(EngineDied("it ended"))
    with pytest.raises(EngineDied):
        await loading
    assert adapters.states == {}
    del sent[:]
    await adapters.send_again()
    assert sent == [PINNED]
    assert not adapters.is_restored
    adapters.take(AdapterLoaded(generation="g", info=make_info("g")))
    assert adapters.is_restored


async def test_what_is_dropped_while_a_new_engine_starts_is_not_waited_for(adapters, sent):
    await loaded(adapters)
    await adapters.send_again()
    await adapters.drop("g")
    assert adapters.is_restored


async def test_a_pin_that_does_not_fit_is_refused_and_changes_nothing(adapters, sent):
    await loaded(adapters)
    with pytest.raises(AdapterBytesExceeded, match="does not fit"):
        await pinned(adapters, error=FULL)
    assert await adapters.load(LOAD) == make_info("g")
    del sent[:]
    await adapters.send_again()
    assert sent == [LOAD]
    adapters.take(AdapterLoaded(generation="g", info=make_info("g")))
    await pinned(adapters)
    await adapters.pin("g", pinned=False)
    assert sent[-1] == PinAdapter(generation="g", pinned=False)


async def test_loads_that_differ_are_each_asked_for(adapters, sent):
    strict = LoadAdapter(generation="g", directory="/store/g")
    first = asyncio.create_task(adapters.load(strict))
    await asyncio.sleep(0)
    second = asyncio.create_task(adapters.load(LOAD))
    await asyncio.sleep(0)
    assert sent == [strict]
    adapters.take(AdapterLoaded(generation="g", error=(InvalidAdapter.code, "nothing")))
    with pytest.raises(InvalidAdapter):
        await first
    async with asyncio.timeout(5):
        while sent != [strict, LOAD]:
            await asyncio.sleep(0)
    adapters.take(AdapterLoaded(generation="g", info=make_info("g")))
    assert await second == make_info("g")


async def test_what_a_new_engine_cannot_read_is_told_and_tried_again(adapters, sent):
    await loaded(adapters)
    await adapters.check(["g", "unknown"])
    await adapters.send_again()
    adapters.take(AdapterLoaded(generation="g", error=("lora_storage_unavailable", "no room")))
    assert adapters.is_restored
    adapters.take(AdapterStates(states={}))
    assert adapters.states == {"g": AdapterState(level=AdapterLevel.LOST)}
    del sent[:]
    for _ in range(3):  # asked for once, however many requests there are
        with pytest.raises(AdapterStorageFailed, match="no room"):
            await adapters.check(["g"])
    assert sent == [LOAD]
    adapters.take(AdapterLoaded(generation="g", info=make_info("g")))
    await adapters.check(["g"])
    assert adapters.states == {}


async def test_what_was_lost_may_be_loaded_anew_or_dropped(adapters, sent):
    for way in (loaded, None):
        await loaded(adapters) if "g" not in adapters.states else None
        await adapters.send_again()
        adapters.take(AdapterLoaded(generation="g", error=("lora_storage_unavailable", "x")))
        assert adapters.states
        await (way(adapters) if way else adapters.drop("g"))
        assert not adapters.states
