"""Text of tokens that an adapter adds, over HTTP: in prompts, answers, log-probabilities, stops."""

import json

import pytest
from support.fake_engine import EOS, VOCAB_SIZE, make_info
from support.http_app import http_client, make_app
from support.small_adapters import write_small_adapter as write_adapter

pytestmark = pytest.mark.anyio
ADMIN = {"authorization": "Bearer boss"}
LOAD = "/v1/load_lora_adapter"
FOO, BAR = VOCAB_SIZE, VOCAB_SIZE + 1
TOKENS = [
    {"id": FOO, "content": "<foo>", "special": False},
    {"id": BAR, "content": "<bar>", "special": True},
    {"id": VOCAB_SIZE + 2, "content": "[PAD]", "special": True},
]


@pytest.fixture
async def server(engine, tmp_path, anyio_backend):
    folder = write_adapter(tmp_path / "adapters" / "new", 1)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": TOKENS}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<bar>"}))
    (folder / "chat_template.jinja").write_text("<foo>{{ messages[0].content }}")
    write_adapter(tmp_path / "adapters" / "plain", 2)
    engine.info_of = lambda generation, path: make_info(
        generation,
        vocab_size=VOCAB_SIZE + 2 if (path / "tokenizer_config.json").exists() else None,
    )
    app = make_app(engine, admin_key="boss", adapter_dir=str(tmp_path / "adapters"))
    async with http_client(app) as http:
        yield http
    await app.state.context.adapters.close()


async def ask(http, path, **body):
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_prompts_have_the_tokens_of_their_own_adapter_only(server, engine):
    sizes = []
    for model in ("new", "fake-model", "plain"):
        await ask(server, "/v1/completions", model=model, prompt="a<foo><bar>")
        sizes.append(engine.requests[-1].prompt_token_ids)
    assert sizes[0] == (*engine.tokenizer.encode("a"), FOO, BAR)
    assert sizes[1] == sizes[2] == tuple(engine.tokenizer.encode("a<foo><bar>"))
    told = await ask(server, "/tokenize", model="new", prompt="<foo>", return_token_strs=True)
    assert (told["tokens"], told["token_strs"]) == ([FOO], ["<foo>"])
    shown = await ask(server, "/detokenize", model="new", tokens=[FOO])
    assert shown["prompt"] == "<foo>"


async def test_answers_stops_and_logprobs_have_their_text(server, engine):
    engine.reply = lambda _request, _index: "a<foo>b<bar>c"
    plain = await ask(server, "/v1/completions", model="new", prompt="x", logprobs=1)
    (choice,) = plain["choices"]
    assert choice["text"] == "a<foo>bc"
    assert choice["logprobs"]["tokens"][:4] == ["a", "<foo>", "b", "<bar>"]
    whole = await ask(server, "/v1/completions", model="new", prompt="x", skip_special_tokens=False)
    assert whole["choices"][0]["text"].startswith("a<foo>b<bar>c")
    stopped = await ask(server, "/v1/completions", model="new", prompt="x", stop="o>b")
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["stop_reason"]) == ("a<fo", "o>b")
    ids = await ask(
        server,
        "/v1/completions",
        model="new",
        prompt="x",
        logprobs=0,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
        echo=True,
    )
    assert ids["choices"][0]["logprobs"]["tokens"][2] == f"token_id:{FOO}"
    assert ids["choices"][0]["token_ids"][1] == FOO


async def test_chats_use_the_template_and_the_end_token_beside_the_weights(server, engine):
    messages = [{"role": "user", "content": "<bar>x"}]
    await ask(server, "/v1/chat/completions", model="new", messages=messages)
    request = engine.requests[-1]
    assert request.prompt_token_ids == (FOO, BAR, *engine.tokenizer.encode("x"))
    assert request.params.stop_token_ids == (BAR,)
    assert EOS not in request.params.stop_token_ids
    await ask(server, "/v1/completions", model="new", prompt="x", ignore_eos=True)
    assert engine.requests[-1].params.stop_token_ids == ()
    await ask(server, "/v1/completions", model="new", prompt="x", bad_words=["<foo>"])
    assert (FOO,) in engine.requests[-1].bad_word_token_ids
    await ask(server, "/v1/completions", model="plain", prompt="x")
    assert engine.requests[-1].params.stop_token_ids == ()


async def test_tokens_without_rows_are_told_and_not_used(server, engine):
    body = {"lora_name": "again", "lora_path": "new"}
    response = await server.post(LOAD, json=body, headers=ADMIN)
    assert response.status_code == 200, response.text
    (warning,) = response.json()["report"]["warnings"]
    assert "'[PAD]'" in warning
    await ask(server, "/v1/completions", model="again", prompt="[PAD]")
    assert max(engine.requests[-1].prompt_token_ids) < VOCAB_SIZE


async def test_tokens_of_another_model_are_refused_and_nothing_is_loaded(server, engine, tmp_path):
    folder = write_adapter(tmp_path / "adapters" / "other", 3)
    wrong = {"added_tokens": [{"id": 65, "content": "<wrong>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(wrong))
    body = {"lora_name": "other", "lora_path": "other"}
    response = await server.post(LOAD, json=body, headers=ADMIN)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_lora_adapter"
    assert "made for another" in response.json()["error"]["message"]
    listed = await server.get("/v1/lora_adapters", headers=ADMIN)
    assert listed.json()["data"] == []


async def test_the_operators_template_goes_before_that_beside_the_weights(engine, tmp_path):
    import dataclasses

    options = dataclasses.replace(engine.config.options, chat_template="{{ 1 }}")
    engine.config = dataclasses.replace(engine.config, options=options)
    folder = write_adapter(tmp_path / "adapters" / "new", 1)
    (folder / "chat_template.jinja").write_text("<foo>")
    app = make_app(engine, adapter_dir=str(tmp_path / "adapters"))
    async with http_client(app) as http:
        messages = [{"role": "user", "content": "x"}]
        await ask(http, "/v1/chat/completions", model="new", messages=messages)
    await app.state.context.adapters.close()
    assert engine.tokenizer.decode(engine.requests[-1].prompt_token_ids).count("x") == 1
