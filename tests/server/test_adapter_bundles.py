"""Adapters over HTTP: what a bundle brings beside weights, and what the metrics say of them."""

import json

import pytest
from support.fake_engine import make_info
from support.http_adapters import CONFIG, ask, load, unload, write_adapter
from support.http_app import MESSAGES, make_app, openai_client

pytestmark = pytest.mark.anyio


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
