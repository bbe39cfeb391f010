"""Adapters over HTTP: those of the folder, that a request brings in."""

import asyncio

import pytest
from support.http_adapters import ask, code, until, write_adapter

from plait.adapters.info import LoadReport
from plait.platform.errors import (
    InvalidAdapter,
)

pytestmark = pytest.mark.anyio


async def test_requests_for_a_folders_adapter_wait_for_one_load_and_hold_up_nobody(server, engine):
    engine.load_gate = asyncio.Event()
    waiting = [asyncio.create_task(ask(server, model="wild")) for _ in range(3)]
    await until(lambda: engine.loads)
    await ask(server)  # the base
    assert not any(task.done() for task in waiting)
    engine.load_gate.set()
    generations = {(await task)["adapter_generation"] for task in waiting}
    assert len(generations) == len(engine.loads) == 1


async def test_a_request_does_not_wait_for_its_adapter_beyond_its_timeout(server, engine):
    engine.load_gate = asyncio.Event()
    assert code(await ask(server, 408, model="wild", timeout=0.05)) == "deadline_exceeded"
    engine.load_gate.set()
    await ask(server, model="wild")


async def test_a_folder_that_does_not_fit_says_why_and_is_not_read_for_every_request(
    server, engine
):
    def refuse(generation, directory):
        raise InvalidAdapter("tensors fit no site", report=LoadReport(unmatched=("x",)))

    engine.info_of = refuse
    for _ in range(3):
        refused = await ask(server, 400, model="wild")
        assert code(refused) == "invalid_lora_adapter"
        assert refused["report"]["unmatched"] == ["x"]
    assert len(engine.loads) == 1


async def test_a_folder_named_like_the_base_is_no_adapter(server, engine, folder):
    write_adapter(folder.parent / "fake-model", 1.0)
    assert code(await ask(server, 404, model="fake-model:fake-model")) == "model_not_found"
    assert engine.loads == []


@pytest.mark.parametrize("name", ["nothing", "..", ".hidden", "a/b", "link", "x" * 65, "wild\0"])
async def test_what_no_folder_serves_is_an_unknown_model(server, engine, folder, name):
    (folder.parent / "link").symlink_to(folder / "sql")
    write_adapter(folder.parent / ".hidden", 1.0)
    assert code(await ask(server, 404, model=name)) == "model_not_found"
    assert engine.loads == []
