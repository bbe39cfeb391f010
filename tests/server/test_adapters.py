"""Adapters over HTTP: choosing, loading, replacing, unloading; who may do it, and every refusal."""

import asyncio
import json
import struct
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine, make_info
from support.http_app import MESSAGES, Connection, http_client, make_app, openai_client, sse_events

from plait.adapters.info import LoadReport
from plait.platform.errors import (
    AdapterBytesExceeded,
    AdapterPlacementFailed,
    AdapterRankExceeded,
    InvalidAdapter,
)
from plait.platform.server.access import Grant

pytestmark = pytest.mark.anyio
ADMIN = {"authorization": "Bearer boss"}
LOAD, UNLOAD, TENSORS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/load_lora_adapter_from_tensors",
)
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
TEXT = "/v1/completions"


def weights(value: float) -> bytes:
    """A safetensors file of one low-rank pair."""
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{name}.lora_A.weight": [1, 8], f"{name}.lora_B.weight": [8, 1]}
    header, data = {}, b""
    for key, shape in shapes.items():
        part = struct.pack("<8f", *[value] * 8)
        offsets = [len(data), len(data) + len(part)]
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += part
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def write_adapter(folder: Path, value: float, **bundle) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "adapter_model.safetensors").write_bytes(weights(value))
    if bundle:
        (folder / "plait_adapter.json").write_text(json.dumps(bundle))
    return folder


@pytest.fixture
def folder(tmp_path):
    """Adapters that an admin loads; what stands above it is loaded by requests too."""
    files = tmp_path / "adapters" / "files"
    for number, name in enumerate(("sql", "tone", "third"), 1):
        write_adapter(files / name, number)
    write_adapter(files.parent / "wild", 4)
    return files


@pytest.fixture
async def server(engine, folder, anyio_backend):
    app = make_app(engine, admin_key="boss", adapter_dir=str(folder.parent))
    async with http_client(app) as http:
        yield http
    await app.state.context.adapters.close()


def below(path):
    return f"files/{path}" if isinstance(path, str) and "/" not in path else path


async def load(http, name="sql", status=200, headers=None, **fields):
    path = fields.pop("lora_path", name)
    body = {"lora_name": name, "lora_path": below(path)} | fields
    answer = await http.post(LOAD, json=body, headers={**ADMIN, **(headers or {})})
    assert answer.status_code == status, answer.text
    return answer.json()


async def unload(http, name="sql", status=200, **fields):
    answer = await http.post(UNLOAD, json={"lora_name": name} | fields, headers=ADMIN)
    assert answer.status_code == status, answer.text
    return answer.json()


async def ask(http, status=200, headers=None, **fields):
    body = {"prompt": "a", "max_tokens": 2} | fields
    answer = await http.post(TEXT, json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


def code(answer) -> str:
    return answer["error"]["code"]


# --- choosing ---


@pytest.mark.parametrize(
    "choice",
    [
        {"model": "sql"},
        {"model": "fake-model:sql"},
        {"adapter": "sql"},
        {"model": "fake-model", "adapter": "sql"},
        {"adapter_id": "sql"},
        {"lora_path": "sql"},
        {"adapters": ["sql"]},
        {"adapters": [{"name": "sql"}]},
        {"lora": [{"id": "sql", "scale": 1.0}]},
        {"model": "sql", "adapter": "sql"},
    ],
    ids=str,
)
async def test_every_way_to_name_an_adapter_runs_with_it(server, engine, choice):
    generation = (await load(server))["generation"]
    answer = await ask(server, **choice)
    assert answer["adapter_generation"] == generation
    assert answer["model"] == choice.get("model", "fake-model")
    (use,) = engine.requests[-1].adapters
    assert (use.generation, use.scale, use.active_from) == (generation, 1.0, 0)


async def test_an_exact_generation_outlives_the_move_of_its_name(server, engine, folder):
    first = (await load(server))["generation"]
    await load(server, "keep", lora_path="sql")
    write_adapter(folder / "sql", 9.0)
    second = (await load(server, load_inplace=True))["generation"]
    assert first != second
    answer = await ask(server, adapter={"generation": first})
    assert answer["adapter_generation"] == first
    assert (await ask(server, model="sql"))["adapter_generation"] == second
    await unload(server, "keep")
    assert code(await ask(server, 404, adapter={"generation": first})) == "model_not_found"


async def test_several_adapters_keep_their_order_and_scales(server, engine):
    one = (await load(server, "sql"))["generation"]
    two = (await load(server, "tone"))["generation"]
    await load(server, "third")
    adapters = [
        {"name": "tone", "scale": 0.5},
        {"name": "third", "scale": 0},
        {"name": "sql", "scale": -2.0},
    ]
    answer = await ask(server, adapters=adapters)
    assert answer["adapter_generation"] == [two, one]
    uses = engine.requests[-1].adapters
    assert [(use.generation, use.scale) for use in uses] == [(two, 0.5), (one, -2.0)]


async def test_each_chunk_of_a_stream_names_the_generation(server):
    generation = (await load(server))["generation"]
    body = {"model": "sql", "messages": MESSAGES, "stream": True}
    answer = await server.post("/v1/chat/completions", json=body)
    *chunks, done = sse_events(answer.content)
    assert done == "[DONE]"
    assert {(c["adapter_generation"], c["model"]) for c in chunks} == {(generation, "sql")}


async def test_base_requests_know_nothing_of_adapters(server, engine):
    await load(server)
    answer = await ask(server)
    assert "adapter_generation" not in answer
    assert engine.requests[-1].adapters == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "sql", "adapter": "tone"}, "adapter"),
        ({"adapter": "sql", "adapters": [{"name": "sql", "scale": 0.5}]}, "adapters"),
        ({"adapters": ["sql", "sql"]}, "adapters"),
        ({"adapters": ["sql", "twin"]}, "adapters"),
        ({"adapters": [{"name": "sql", "scale": 101}]}, "adapters"),
        ({"adapters": [{"name": "sql", "generation": "0" * 64}]}, "adapters[0]"),
        ({"adapters": ["sql"] * 9}, "adapters"),
        ({"adapters": [{}]}, "adapters[0]"),
        ({"adapter": {"generation": "xyz"}}, "adapter.generation"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora[0].id"),
        ({"lora_request": {"lora_name": "x"}}, "lora_request"),
        ({"adapter": {str(i): 1 for i in range(5000)}}, "adapter"),
    ],
    ids=str,
)
async def test_a_choice_that_cannot_be_meant_is_refused(server, engine, fields, param):
    for name in ("sql", "tone", "twin"):
        await load(server, name, lora_path=name.replace("twin", "sql"))
    assert (await ask(server, 400, **fields))["error"]["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize(
    "fields", [{"adapters": ["sql", "tone"]}, {"adapters": [{"name": "sql", "scale": 0.5}]}]
)
async def test_dora_is_neither_combined_nor_scaled(server, engine, fields):
    engine.info_of = lambda generation, _: make_info(generation, has_dora=True)
    await load(server, "sql")
    await load(server, "tone")
    error = (await ask(server, 400, **fields))["error"]
    assert "'sql'" in error["message"]
    assert "DoRA" in error["message"]


async def test_an_invocation_wakes_an_adapter_from_its_last_start_on(server, engine):
    engine.info_of = lambda g, _: make_info(g, invocation_token_ids=(98, 99))
    await load(server)
    await ask(server, model="sql", prompt=[97, 98, 99, 97, 98, 99, 97, 98])
    (use,) = engine.requests[-1].adapters
    assert use.active_from == 4
    await ask(server, model="sql", prompt=[97, 99, 98, 98])
    assert engine.requests[-1].adapters == ()


async def test_an_adapters_own_tokens_are_in_the_vocabulary_of_its_requests_alone(server, engine):
    engine.info_of = lambda g, _: make_info(g, vocab_size=262)
    await load(server)
    await ask(server, model="sql", prompt=[261, 1], logit_bias={"260": 1})
    assert engine.requests[-1].vocab_size == 262
    await ask(server, 400, prompt=[261, 1])
    await ask(server, 400, model="sql", prompt=[262])


# --- loading ---


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


async def until(holds) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


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


# --- on demand ---


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


# --- who may ---


async def test_without_an_admin_key_nothing_can_be_changed(engine, folder):
    app = make_app(engine, adapter_dir=str(folder.parent))
    async with http_client(app) as http:
        for path in (LOAD, UNLOAD, "/load_lora_adapter", "/unload_lora_adapter"):
            answer = await http.post(path, json={"lora_name": "sql", "lora_path": "wild"})
            assert (answer.status_code, code(answer.json())) == (404, "not_found")
        await ask(http, model="wild")
    await app.state.context.adapters.close()


async def test_the_admin_key_alone_opens_the_admins_routes(engine, folder):
    app = make_app(engine, api_keys=("user",), admin_key="boss", adapter_dir=str(folder.parent))
    async with http_client(app) as http:
        for headers in ({}, {"authorization": "Bearer user"}, {"x-api-key": "wrong"}):
            answer = await http.post(LOAD, content=b"not even JSON", headers=headers)
            assert (answer.status_code, code(answer.json())) == (401, "invalid_api_key")
        await load(http)
        await ask(http, model="sql", headers=ADMIN)
        await ask(http, 401, model="sql")
    await app.state.context.adapters.close()


@pytest.mark.parametrize("root", ["/llm", "/llm/", "llm", "/"])
async def test_no_prefix_of_the_proxy_opens_the_admins_routes(engine, folder, root):
    app = make_app(engine, root_path=root, admin_key="boss", adapter_dir=str(folder.parent))
    given = app.state.context.settings.root_path  # what uvicorn is given, and puts before paths
    for prefix in {given, root}:
        connection = Connection(app, f"{prefix}{LOAD}", b'{"lora_name": "x", "lora_path": "wild"}')
        connection._scope |= {"root_path": prefix}
        async with connection:
            assert (await connection.next_message())["status"] == 401
    assert not len(app.state.context.adapters.registry)


async def test_a_forbidden_adapter_is_answered_like_an_unknown_one(engine, folder):
    keys = (Grant(key="few", adapters=("s*",), weight=2.0), Grant(key="none", adapters=()))
    app = make_app(engine, grants=keys, admin_key="boss", adapter_dir=str(folder.parent))
    few, none = {"x-api-key": "few"}, {"x-api-key": "none"}
    engine.drafts = {"ngram": (9, 5)}
    async with http_client(app) as http:
        for name in ("sql", "tone"):
            await load(http, name)
            await ask(http, model=name, headers=ADMIN)
        generation = (await ask(http, model="sql", headers=few))["adapter_generation"]
        for way in ({"model": "{}"}, {"adapter": "{}"}, {"model": "fake-model:{}"}):
            texts = set()
            for name in ("tone", "wild", "xxxxx"):  # loaded, in the folder, nowhere
                filled = {key: value.format(name) for key, value in way.items()}
                error = (await ask(http, 404, headers=few, **filled))["error"]
                texts.add(json.dumps(error).replace(name, "…"))
            assert len(texts) == 1
        assert code(await ask(http, 404, headers=none, model="sql")) == "model_not_found"
        exact = {"adapter": {"generation": generation}}
        await ask(http, headers=few, **exact)
        await ask(http, 404, headers=none, **exact)
        for headers, names in ((few, ["sql"]), (none, []), (ADMIN, ["sql", "tone"])):
            listed = (await http.get("/v1/lora_adapters", headers=headers)).json()["data"]
            assert [each["name"] for each in listed] == names
            models = (await http.get("/v1/models", headers=headers)).json()["data"]
            assert [m["id"] for m in models] == ["fake-model", *names]
            status = (await http.get("/v1/models/tone", headers=headers)).status_code
            assert status == (200 if "tone" in names else 404)
            metrics = (await http.get("/metrics", headers=headers)).text
            assert {name for name in ("sql", "tone") if name in metrics} == set(names)
            assert "vllm:num_requests_running" in metrics
        assert len(engine.loads) == 2  # what nobody may use is not loaded for them
    await app.state.context.adapters.close()


async def test_a_key_is_a_tenant_with_its_weight(engine):
    grants = (Grant(key="heavy", weight=3.0),)
    app = make_app(engine, api_keys=("plain",), grants=grants)
    async with http_client(app) as http:
        await ask(http, headers={"x-api-key": "heavy"})
        await ask(http, headers={"x-api-key": "plain"})
    heavy, plain = engine.requests
    assert (heavy.share, plain.share) == (3.0, 1.0)
    assert len({heavy.tenant, plain.tenant, "heavy", "plain", ""}) == 5


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("k", Grant(key="k")),
        ("k adapters=sql-*,tone weight=2", Grant(key="k", adapters=("sql-*", "tone"), weight=2.0)),
        ("k adapters=", Grant(key="k", adapters=())),
    ],
)
async def test_a_line_of_a_key_file(line, expected):
    assert Grant.parse(line) == expected


@pytest.mark.parametrize(
    "line", ["k x", "k weight=0", "k weight=nan", "k weight=x", "k adaptors=a"]
)
async def test_a_line_that_means_nothing_is_refused(line):
    with pytest.raises(ValueError, match=r"weight|adapters"):
        Grant.parse(line)


# --- what an adapter brings ---


async def test_a_bundle_speaks_where_the_request_is_silent(server, engine, folder):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ bos_token }}"
    sampling = {"temperature": 0.25, "max_tokens": 3}
    write_adapter(folder / "sql", 1.0, stop=["!"], sampling=sampling, chat_template=template)
    await load(server)
    body = {"model": "sql", "messages": MESSAGES}
    await server.post("/v1/chat/completions", json=body)
    request = engine.requests[-1]
    assert engine.tokenizer.decode(request.prompt_token_ids) == "[Hello]"
    params = request.params
    assert (params.temperature, params.max_tokens, params.stop) == (0.25, 3, ("!",))
    own = {"temperature": 1.0, "max_completion_tokens": 5, "stop": "?"}
    await server.post("/v1/chat/completions", json=body | own)
    params = engine.requests[-1].params
    assert (params.temperature, params.max_tokens, params.stop) == (1.0, 5, ("?",))
    tokens = (await server.post("/tokenize", json=body)).json()["tokens"]
    assert tuple(tokens) == request.prompt_token_ids


async def test_a_bundles_format_holds_where_the_request_has_none(server, engine, folder):
    write_adapter(folder / "sql", 1.0, response_format={"type": "json_object"})
    await load(server)
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Hello"}),
    ):
        await server.post(path, json=body | {"model": "sql"})
        assert engine.requests[-1].grammar is not None
        free = body | {"model": "sql", "response_format": {"type": "text"}}
        await server.post(path, json=free)
        assert engine.requests[-1].grammar is None


@pytest.mark.parametrize(
    ("named", "shown"),
    [
        ("org/model", "org/model"),
        ("model", "model"),
        ("/home/someone/models/base/", "base"),
        ("./base", "base"),
        ("~/base", "base"),
        ("C:\\Users\\someone\\base", "base"),
    ],
)
async def test_where_a_trainer_had_its_base_is_not_told(server, engine, folder, named, shown):
    config = CONFIG | {"base_model_name_or_path": named}
    (folder / "sql" / "adapter_config.json").write_text(json.dumps(config))
    engine.info_of = lambda generation, _: make_info(generation, base_model=named)
    await load(server)
    text = (await server.get("/v1/lora_adapters")).text
    assert json.loads(text)["data"][0]["base_model"] == shown
    assert "someone" not in text


# --- metrics, clients ---


async def test_series_of_an_adapter_end_with_it_and_not_with_its_requests(server, engine):
    generation = (await load(server))["generation"]
    engine.drafts = {"ngram": (9, 5)}
    await ask(server, model="sql", max_tokens=4)
    text = (await server.get("/metrics")).text
    assert 'plait:adapter_resident{adapter="sql",level="device"} 1.0' in text
    assert 'plait:adapter_requests_total{adapter="sql"} 1.0' in text
    assert 'plait:adapter_generation_tokens_total{adapter="sql"} 4.0' in text
    for outcome, num in (("accepted", 5), ("rejected", 4)):
        labels = f'adapter="sql",outcome="{outcome}",source="ngram"'
        assert f"plait:adapter_draft_tokens_total{{{labels}}} {num}.0" in text
    assert f'generation="{generation}"' in text
    assert 'vllm:lora_requests_info{max_lora="1024",running_lora_adapters=""' in text
    await unload(server)
    assert 'adapter="sql"' not in (await server.get("/metrics")).text


async def test_labels_are_bounded(server, engine, monkeypatch):
    monkeypatch.setattr("plait.platform.server.adapters.usage.MAX_LABELS", 1)
    for name in ("sql", "tone"):
        await load(server, name)
        await ask(server, model=name)
    text = (await server.get("/metrics")).text
    assert 'plait:adapter_requests_total{adapter="sql"} 1.0' in text
    assert 'plait:adapter_requests_total{adapter="other"} 1.0' in text
    assert 'plait:adapter_requests_total{adapter="tone"}' not in text


async def test_openais_client_chooses_adapters_by_model(engine, folder):
    app = make_app(engine, adapter_dir=str(folder.parent))
    async with openai_client(app) as client:
        answer = await client.chat.completions.create(model="wild", messages=MESSAGES)
        assert answer.model == "wild"
        assert len(answer.adapter_generation) == 64
        models = await client.models.list()
        assert [model.id for model in models.data] == ["fake-model", "wild"]
    await app.state.context.adapters.close()
