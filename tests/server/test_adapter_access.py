"""Adapters over HTTP: who may load them, use them and know of them."""

import json

import pytest
from support.http_adapters import ADMIN, LOAD, UNLOAD, ask, code, load
from support.http_app import Connection, http_client, make_app

from plait.platform.server.access import Grant

pytestmark = pytest.mark.anyio


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
        assert "and its adapters are: 'sql'" in error["message"]
        assert "tone" not in json.dumps(error).replace(name, "…")
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
