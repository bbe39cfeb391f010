"""Adapters over HTTP: the ways to name one in a request, and what a choice cannot be."""

import pytest
from support.fake_engine import make_info
from support.http_adapters import ask, code, load, unload, write_adapter
from support.http_app import MESSAGES, sse_events

pytestmark = pytest.mark.anyio


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
        ({"adapters": ["tone", {"name": "sql", "scale": "0.5"}]}, "adapters[1].scale"),
        ({"adapter": {"name": "sql", "scale": "0.5"}}, "adapter.scale"),
        ({"adapters": [{"name": "sql", "generation": "0" * 64}]}, "adapters[0]"),
        ({"adapters": ["sql"] * 9}, "adapters"),
        ({"adapters": [{}]}, "adapters[0]"),
        ({"adapter": {"generation": "xyz"}}, "adapter.generation"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora[0].id"),
        ({"lora_request": {"lora_name": "x"}}, "lora_request"),
        ({"adapter": {str(i): 1 for i in range(5000)}}, "adapter"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_a_choice_that_cannot_be_meant_is_refused(server, engine, fields, param):
    for name in ("sql", "tone", "twin"):
        await load(server, name, lora_path=name.replace("twin", "sql"))
    assert (await ask(server, 400, **fields))["error"]["param"] == param
    assert engine.requests == []


async def test_a_scale_that_is_no_number_is_told_as_that(server):
    error = (await ask(server, 400, adapter={"name": "sql", "scale": "0.5"}))["error"]
    assert error["message"] == "adapter.scale: Input should be a valid number (got a string)"


async def test_who_asks_for_an_unknown_one_is_told_a_few_that_there_are(server):
    for number in range(12):
        await load(server, f"a{number:02}", lora_path="sql")
    message = (await ask(server, 404, model="a"))["error"]["message"]
    assert message.startswith("model 'a' is not served here; 'fake-model' is, and its adapters")
    assert "'a09' and 2 more" in message
    assert "'a10'" not in message


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
