"""Adapters over HTTP: loading, replacing and unloading, and every refusal."""

import asyncio
import json

import pytest
from support.fake_engine import FakeEngine, make_info
from support.http_adapters import (
    ADMIN,
    CONFIG,
    LOAD,
    TENSORS,
    ask,
    below,
    code,
    load,
    unload,
    until,
    weights,
    write_adapter,
)
from support.http_app import http_client, make_app

from plait.adapters.info import LoadReport
from plait.platform.errors import (
    AdapterBytesExceeded,
    AdapterPlacementFailed,
    AdapterRankExceeded,
    InvalidAdapter,
)

pytestmark = pytest.mark.anyio


async def test_a_load_answers_with_generation_and_report_and_is_listed(server, engine):
    loaded = await load(server, pinned=True)
    assert loaded["success"] is True
    assert loaded["report"]["sites"][0]["rank"] == 8
    assert engine.loads == [(loaded["generation"], True, False)]
    models = (await server.get("/v1/models")).json()["data"]
    assert [(m["id"], m["root"], m["parent"]) for m in models] == [
        ("fake-model", "fake-model", None),
        ("sql", "sql", "fake-model"),
    ]
    assert (await server.get("/v1/models/sql")).json() == models[1]
    (listed,) = (await server.get("/v1/lora_adapters")).json()["data"]
    assert listed["generation"] == loaded["generation"]
    assert (listed["level"], listed["pinned"], listed["leases"]) == ("device", True, 0)
    assert (await server.get("/v1/lora_adapters/sql")).json() == listed
    assert (await server.get("/v1/lora_adapters/x")).json()["error"][
        "code"
    ] == "lora_adapter_not_found"


async def test_clients_of_vllm_read_their_own_words(server):
    text = {"accept": "text/plain", **ADMIN}
    body = {
        "lora_name": "sql",
        "lora_path": "files/sql",
        "load_inplace": False,
        "is_3d_lora_weight": False,
    }
    answer = await server.post("/v1/load_lora_adapter", json=body, headers=text)
    assert answer.text == "Success: LoRA adapter 'sql' added successfully."
    body = {"lora_name": "sql", "lora_int_id": 1}
    answer = await server.post("/unload_lora_adapter", json=body, headers=text)
    assert answer.text == "Success: LoRA adapter 'sql' removed successfully."


async def test_tensors_and_files_of_equal_bytes_are_one_generation(server, engine):
    query = {"lora_name": "pushed", "config": json.dumps(CONFIG)}
    headers = {"content-type": "application/octet-stream", **ADMIN}
    answer = await server.post(TENSORS, params=query, content=weights(1), headers=headers)
    assert answer.status_code == 200, answer.text
    loaded = await load(server)
    assert answer.json()["generation"] == loaded["generation"]
    assert (await unload(server, "pushed"))["leases"] == 0
    await asyncio.sleep(0)
    assert engine.dropped == []
    await unload(server, "sql")
    await until(lambda: engine.dropped == [loaded["generation"]])


async def test_an_unloaded_adapter_stays_until_its_requests_have_ended(server, engine):
    generation = (await load(server))["generation"]
    engine.gate = asyncio.Event()
    running = asyncio.create_task(ask(server, model="sql", max_tokens=5))
    await until(lambda: engine.num_open == 1)
    assert await unload(server) == {"success": True, "generation": generation, "leases": 1}
    assert code(await ask(server, 404, model="sql", adapter="sql")) == "model_not_found"
    assert engine.dropped == []
    engine.gate.set()
    assert (await running)["adapter_generation"] == generation
    await until(lambda: engine.dropped == [generation])


async def test_what_is_loaded_again_while_others_are_removed_stays(server, engine, monkeypatch):
    for name in ("sql", "tone"):
        await load(server, name)
    engine.gate, removing, may_go = asyncio.Event(), asyncio.Event(), asyncio.Event()
    both = asyncio.create_task(ask(server, adapters=["sql", "tone"]))
    while not engine.num_open:
        await asyncio.sleep(0)
    for name in ("sql", "tone"):
        await unload(server, name)
    drop = engine.drop_adapter

    async def drop_slowly(generation):
        removing.set()
        await may_go.wait()
        await drop(generation)

    monkeypatch.setattr(engine, "drop_adapter", drop_slowly)
    engine.gate.set()
    kept, gone = (await both)["adapter_generation"]  # the newest lease ends first
    await removing.wait()
    assert (await load(server, "sql"))["generation"] == kept
    may_go.set()
    while gone not in engine.dropped:
        await asyncio.sleep(0)
    await load(server, "third")  # behind whatever was still removed
    assert engine.dropped == [gone]
    assert (engine.directories[kept] / "adapter_model.safetensors").exists()


async def test_a_client_that_leaves_gives_its_adapter_back(server, engine):
    generation = (await load(server))["generation"]
    engine.gate = asyncio.Event()
    for stream in (True, False):
        running = asyncio.create_task(ask(server, model="sql", stream=stream))
        await until(lambda: engine.num_open == 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await unload(server)
    await until(lambda: engine.dropped == [generation])


async def test_replacing_moves_the_name_and_leaves_what_runs(server, engine, folder):
    first = (await load(server))["generation"]
    engine.gate = asyncio.Event()
    running = asyncio.create_task(ask(server, model="sql", max_tokens=3))
    await until(lambda: engine.num_open == 1)
    write_adapter(folder / "sql", 7.0)
    second = (await load(server, load_inplace=True, expected_generation=first))["generation"]
    engine.gate.set()
    assert (await running)["adapter_generation"] == first
    assert (await ask(server, model="sql"))["adapter_generation"] == second
    await until(lambda: engine.dropped == [first])


async def test_of_two_writers_that_expect_the_same_generation_one_wins(server, engine):
    first = (await load(server))["generation"]
    query = {
        "lora_name": "sql",
        "config": json.dumps(CONFIG),
        "load_inplace": "true",
        "expected_generation": first,
    }
    headers = {"content-type": "application/octet-stream", **ADMIN}

    async def push(value):
        while True:
            answer = await server.post(
                TENSORS, params=query, content=weights(value), headers=headers
            )
            if answer.status_code != 429:
                return answer
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "lora_load_busy"
            await asyncio.sleep(0.001)

    answers = await asyncio.gather(push(5.0), push(6.0))
    won, lost = sorted(answers, key=lambda answer: answer.status_code)
    assert (won.status_code, lost.status_code) == (200, 409)
    assert lost.json()["error"]["code"] == "lora_generation_mismatch"
    assert (await ask(server, model="sql"))["adapter_generation"] == won.json()["generation"]


async def test_a_load_that_fails_leaves_the_name_and_tells_why(server, engine, folder):
    first = (await load(server))["generation"]
    write_adapter(folder / "sql", 7.0)
    report = LoadReport(unmatched=("model.layers.9.q_proj.lora_A.weight",))

    def refuse(generation, directory):
        raise InvalidAdapter("tensors fit no site", report=report)

    engine.info_of = refuse
    refused = await load(server, status=400, load_inplace=True)
    assert code(refused) == "invalid_lora_adapter"
    assert refused["report"]["unmatched"] == ["model.layers.9.q_proj.lora_A.weight"]
    assert (await ask(server, model="sql"))["adapter_generation"] == first
    await until(lambda: len(engine.dropped) == 1)  # what was copied for nothing is gone
    assert engine.dropped != [first]


async def test_an_adapter_is_not_there_before_it_can_be_used(server, engine):
    engine.load_gate = asyncio.Event()
    loading = asyncio.create_task(load(server, "new", lora_path="sql"))
    await until(lambda: engine.loads)
    assert code(await ask(server, 404, model="new:x")) == "model_not_found"
    assert [m["id"] for m in (await server.get("/v1/models")).json()["data"]] == ["fake-model"]
    assert code(await load(server, "new", 429, lora_path="tone")) == "lora_load_busy"
    engine.load_gate.set()
    await loading
    await ask(server, model="new")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AdapterRankExceeded("rank 512"), 400),
        (AdapterBytesExceeded("too large"), 409),
        (AdapterPlacementFailed("no memory"), 503),
    ],
    ids=lambda value: str(getattr(value, "code", value)),
)
async def test_what_the_engine_refuses_keeps_its_code(server, engine, error, status):
    def refuse(generation, directory):
        raise error

    engine.info_of = refuse
    assert code(await load(server, status=status)) == error.code


@pytest.mark.parametrize(
    ("fields", "status", "expected"),
    [
        ({"lora_name": "../x"}, 400, "invalid_lora_name"),
        ({"lora_name": ".."}, 400, "invalid_lora_name"),
        ({"lora_name": "a/b"}, 400, "invalid_lora_name"),
        ({"lora_name": "a:b"}, 400, "invalid_lora_name"),
        ({"lora_name": "a\0b"}, 400, "invalid_lora_name"),
        ({"lora_name": "a\n"}, 400, "invalid_lora_name"),
        ({"lora_name": ""}, 400, "invalid_lora_name"),
        ({"lora_name": "x" * 65}, 400, "invalid_lora_name"),
        ({"lora_name": "fake-model"}, 400, "invalid_lora_name"),
        ({"lora_name": "loaded"}, 400, "lora_adapter_already_loaded"),
        ({"lora_path": "nowhere"}, 404, "adapter_path_not_found"),
        ({"lora_path": "../adapters/files/sql"}, 403, "adapter_path_forbidden"),
        ({"lora_path": "/etc"}, 403, "adapter_path_forbidden"),
        ({"lora_path": "link"}, 403, "adapter_path_forbidden"),
        ({"lora_path": "pickle"}, 400, "invalid_lora_adapter"),
        ({"lora_path": "empty"}, 400, "invalid_lora_adapter"),
        ({"lora_path": "cut"}, 400, "invalid_lora_adapter"),
        ({"lora_path": "formatted"}, 400, "invalid_lora_adapter"),
        ({"lora_path": "drafting"}, 400, "invalid_lora_adapter"),
        ({"expected_generation": "0" * 64}, 400, "invalid_lora_load_policy"),
        ({"expected_generation": "0" * 64, "load_inplace": True}, 409, "lora_generation_mismatch"),
        ({"expected_generation": "0"}, 400, "invalid_request_body"),
        ({"lora_path": None}, 400, "invalid_request_body"),
        ({"lora_name": 5}, 400, "invalid_request_body"),
        ({"lora_pth": "x"}, 400, "invalid_request_body"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_each_refusal_of_a_load_has_its_code(
    server, engine, folder, fields, status, expected
):
    await load(server, "loaded", lora_path="sql")
    (folder / "link").symlink_to(folder / "sql")
    (folder / "empty").mkdir()
    (folder / "pickle").mkdir()
    (folder / "pickle" / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "pickle" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    write_adapter(folder / "cut", 1.0)
    (folder / "cut" / "adapter_model.safetensors").write_bytes(weights(1)[:-3])
    write_adapter(folder / "formatted", 1.0, response_format={"type": "xml"})
    write_adapter(folder / "drafting", 1.0, draft_adapter="small")
    fields = {key: below(v) if key == "lora_path" else v for key, v in fields.items()}
    body = {"lora_name": "new", "lora_path": "files/sql"} | fields
    answer = await server.post(LOAD, json=body, headers=ADMIN)
    assert answer.status_code == status, answer.text
    assert code(answer.json()) == expected
    assert str(folder.parent) not in answer.text
    assert len(engine.loads) == 1
    await ask(server, model="loaded")


async def test_what_changes_nothing_needs_to_be_meant_under_each_name(server, engine):
    engine.info_of = lambda generation, _: make_info(generation, changes_nothing=True)
    await load(server, "sql", allow_zero_delta=True)
    refused = await load(server, "again", lora_path="sql", status=400)
    assert refused["error"]["code"] == "invalid_lora_adapter"
    assert "allow_zero_delta" in refused["error"]["message"]
    await load(server, "again", lora_path="sql", allow_zero_delta=True)


async def test_a_pin_that_does_not_hold_is_refused_to_who_asked(engine, folder):
    app = make_app(engine, adapter_dir=str(folder.parent))
    service = app.state.context.adapters
    await service.demand("wild")
    engine.pin_error = AdapterBytesExceeded("no room")
    with pytest.raises(AdapterBytesExceeded):
        await service.pin("wild", pinned=True)
    assert not service.registry.get("wild").pinned
    engine.pin_error = None
    await service.pin("wild", pinned=True)
    assert service.registry.get("wild").pinned
    await service.close()


async def test_unloading_what_is_not_there_or_has_moved_on_changes_nothing(server):
    assert code(await unload(server, "x", 404)) == "lora_adapter_not_found"
    await load(server)
    gone = await unload(server, status=409, expected_generation="0" * 64)
    assert code(gone) == "lora_generation_mismatch"
    await ask(server, model="sql")


async def test_names_are_bounded_and_those_of_requests_give_way(engine, folder):
    app = make_app(engine, admin_key="boss", adapter_dir=str(folder.parent), max_adapters=2)
    async with http_client(app) as http:
        await ask(http, model="wild")  # on demand
        await load(http, "sql")
        await load(http, "third")  # takes the place of what only a request had loaded
        ids = [m["id"] for m in (await http.get("/v1/models")).json()["data"]]
        assert ids == ["fake-model", "sql", "third"]
        refused = await load(http, "more", 409, lora_path="tone")
        assert code(refused) == "lora_adapter_limit_exceeded"
        assert code(await ask(http, 409, model="wild")) == "lora_adapter_limit_exceeded"
    await app.state.context.adapters.close()


async def test_without_memory_for_adapters_loading_says_so(folder):
    import dataclasses

    engine = FakeEngine()
    options = dataclasses.replace(engine.config.options, adapter_memory_bytes=0)
    engine.config = dataclasses.replace(engine.config, options=options)
    app = make_app(engine, admin_key="boss", adapter_dir=str(folder.parent))
    async with http_client(app) as http:
        assert code(await load(http, status=409)) == "lora_runtime_unavailable"
