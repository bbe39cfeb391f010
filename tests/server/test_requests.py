"""What is refused, and how: every refusal names its field, in OpenAI's body, before any work."""

import contextlib
import json

import openai
import pytest
from support.http_app import MESSAGES, http_client, make_app, openai_client

from plait.platform.errors import BadRequest
from plait.platform.server import body as body_module
from plait.platform.server.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from plait.platform.server.settings import ServerSettings

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def refusal(http, path, body, status=400):
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 5.0),
        ("max_tokens", True),
        ("max_tokens", 10**12),
        ("max_tokens", -1),
        ("n", True),
        ("n", 0),
        ("n", 17),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-300),  # a logit over it is no number any more
        ("seed", 1.5),
        ("seed", 2**63),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", [""]),
        ("stop", list("abcde")),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [260]),
        ("stop_token_ids", [1] * 129),
        ("bad_words", ["a"] * 129),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 1, "01": 2}),  # one of two would be dropped
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"260": 1}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-5]),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", {"include_usage": True}),
        ("priority", 101),
        ("request_id", "a b"),
        ("request_id", ""),
        ("cache_salt", ""),
        ("timeout", 0),
        ("timeout", -1),
        ("best_of", 2),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", 0),
        ("echo", "yes"),
        ("response_format", {"type": "json"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("structured_outputs", {}),
        ("guided_json", 1),
        ("guided_regex", ["a"]),
        ("guided_choice", "a"),
        ("guided_grammar", {}),
        ("chat_template", "{{ x }}"),
        ("mm_processor_kwargs", {}),
        ("prompt_embeds", "x"),
        ("kv_transfer_params", {}),
        ("documents", []),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bad_value_names_its_field(http, engine, path, field, value):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    error = await refusal(http, path, prompt | {field: value})
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0].split(".")[0] in (field, "max_completion_tokens")
    assert field in error["message"] or error["param"] in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"continue_final_message": True, "add_generation_prompt": True}, None),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": [1]}}, None),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None),
        ({"messages": [*MESSAGES, {"role": "tool"}]}, "messages[1].content"),
        ({"messages": [*MESSAGES, {"role": "function", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": "x", "kontent": "y"}]}, "messages[0].kontent"),
        ({"messages": MESSAGES * 2049}, "messages"),
    ],
)
async def test_what_chats_refuse(http, extra, param):
    error = await refusal(http, CHAT, {"messages": MESSAGES} | extra)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "image_embeds"])
async def test_media_parts_are_refused_by_name(http, kind):
    part = {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}]
    error = await refusal(http, CHAT, {"messages": messages})
    assert error["code"] == "unsupported"
    assert error["param"] == "messages[0].content[1]"
    assert kind in error["message"]
    assert "text only" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": [1, "a"]}, None),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "a" * 5000}, "prompt"),
    ],
)
async def test_what_completions_refuse(http, engine, body, param):
    error = await refusal(http, TEXT, body)
    if param is not None:
        assert error["param"] == param
    assert engine.requests == []


async def test_context_overflow_tells_the_numbers(http):
    error = await refusal(http, TEXT, {"prompt": "a" * 4000, "max_tokens": 200})
    assert error["code"] == "context_length_exceeded"
    for number in ("4000", "200", "4096", "96"):
        assert number in error["message"]


async def test_unknown_field_names_the_nearest(http):
    error = await refusal(http, CHAT, {"messages": MESSAGES, "temprature": 1})
    assert error["code"] == "unknown_field"
    assert error["param"] == "temprature"
    assert "did you mean temperature?" in error["message"]


async def test_unknown_fields_can_be_allowed(engine, caplog):
    async with http_client(make_app(engine, allow_unknown_fields=True)) as http:
        for _ in range(2):
            body = {"messages": MESSAGES, "some_new_field": 1}
            assert (await http.post(CHAT, json=body)).status_code == 200
    assert caplog.text.count("some_new_field") == 1


async def test_what_sdks_send_without_effect_is_ignored(http):
    body = {
        "messages": MESSAGES,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "prediction": None,
        "parallel_tool_calls": True,
        "tools": None,
        "tool_choice": "none",
        "functions": [],
        "response_format": {"type": "text"},
        "stop": None,
        "seed": None,
        "logit_bias": None,
        "stream_options": None,
        "guided_json": None,
        "best_of": 1,
    }
    response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b"", "valid JSON"),
        (b'{"prompt": "a",}', "line 1, column 16"),
        (b'{\n  "prompt": nope}', "line 2"),
        (b'{"prompt": "a", "temperature": NaN}', "valid JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "valid JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "\\ud800"}', "line 1, column 13: \\ud800 is half of a surrogate pair"),
        (b'{"prompt": "\\ud83d\\ude00 \\\\ud800 \\\\\\udc00"}', "column 36: \\udc00 is half"),
        (b'{"prompt": "\\uzz00 \\ud800"}', "invalid character in unicode escape"),
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens" : 2}', "'max_tokens' twice"),
        (b'{"prompt": "a", "logit_bias": {"1": 1, "\\u0031": 2}}', "'1' twice"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"[1]", "object"),
        (b'"text"', "object"),
        (b'{"prompt": ' + b"[" * 64 + b"1" + b"]" * 64 + b"}", "64 levels"),
        (b"[" * 500_000, "64 levels"),
    ],
)
async def test_broken_json_tells_where(http, raw, where):
    headers = {"content-type": "application/json"}
    response = await http.post(TEXT, content=raw, headers=headers)
    assert response.status_code == 400
    assert where in response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ['":', 'a" :{"a":1,"a":2}', '\\":\\', "\ud83d\ude00"])
async def test_text_that_looks_like_keys_is_text(http, prompt):
    for body in ({"prompt": prompt}, {"prompt": "a", "stop": [prompt]}):
        for indent in (None, 2):
            raw = json.dumps(body, indent=indent)
            response = await http.post(
                TEXT, content=raw, headers={"content-type": "application/json"}
            )
            assert response.status_code == 200, response.text


@pytest.mark.parametrize("max_tokens", [4096, 5000])
async def test_truncation_to_what_fits_needs_room_beside_the_answer(http, max_tokens):
    body = {"prompt": "abcde", "truncate_prompt_tokens": -1, "max_tokens": max_tokens}
    error = await refusal(http, TEXT, body)
    assert error["code"] == "context_length_exceeded"
    assert f"5 tokens and max_tokens is {max_tokens}" in error["message"]


async def test_large_bodies_are_parsed_off_the_loop_alike(http, engine):
    prompt = "x" * 100_000
    assert (await refusal(http, TEXT, {"prompt": prompt}))["code"] == "context_length_exceeded"
    body = {"prompt": prompt, "truncate_prompt_tokens": 10}
    assert (await http.post(TEXT, json=body)).status_code == 200


async def test_model_may_be_left_out_but_not_another(app, engine):
    async with openai_client(app) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="gpt-x", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert "fake-model" in str(caught.value)
    async with http_client(make_app(engine, served_model_name="my/name")) as http:
        answer = (await http.post(TEXT, json={"prompt": "a"})).json()
        assert answer["model"] == "my/name"
        models = (await http.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == ["my/name"]
        assert models["data"][0]["max_model_len"] == 4096
        assert (await http.get("/v1/models/my/name")).json()["id"] == "my/name"
        assert (await http.get("/v1/models/other")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/models/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/health", 405),
        ("POST", "/v1/nothing", 404),
    ],
)
async def test_unknown_routes_and_methods_have_the_same_body(http, method, path, status):
    json = {} if method == "POST" else None
    response = await http.request(method, path, json=json)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize("schema", [ChatCompletionRequest, CompletionRequest, DetokenizeRequest])
def test_many_bad_entries_are_few_errors(monkeypatch, schema):
    """A body has room for millions, and each error would cost more than its entry."""
    counts = []

    def explain(error, _fields):
        counts.append(error.error_count())
        return BadRequest("refused")

    monkeypatch.setattr(body_module, "_explain", explain)
    for field in schema.model_fields:
        for value in (
            [None] * 2100,
            ["a", *[None] * 2100],
            [[None] * 2100],
            {str(i): [] for i in range(2100)},
            [{"role": "user", "content": [None] * 2100}],
        ):
            with contextlib.suppress(BadRequest):
                body_module.parse_body(
                    json.dumps({field: value}).encode(), schema, ServerSettings()
                )
    assert counts
    assert max(counts) < 20


@pytest.mark.parametrize(
    ("field", "value", "numbers"),
    [
        (
            "logit_bias",
            {str(i): "x" for i in range(1025)},
            "1025 entries are over the limit of 1024",
        ),
        ("chat_template_kwargs", {str(i): 1 for i in range(65)}, "65 entries"),
        ("stream_options", {str(i): 1 for i in range(17)}, "17 entries"),
        ("messages", [{"role": "user", "content": [0] * 4097}] * 2, "8194 content parts"),
        ("messages", [0] * 2049, "2049 entries"),
        ("allowed_token_ids", [1] * 261, "more entries than the vocabulary of 260"),
    ],
)
async def test_entries_are_counted_before_they_are_looked_at(http, field, value, numbers):
    error = await refusal(http, CHAT, {"messages": MESSAGES, field: value})
    assert error["param"] == field
    assert numbers in error["message"]


async def test_request_ids_are_echoed_or_made(http, engine):
    response = await http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "cmpl-abc-1"
    assert "abc-1" in engine.requests[0].request_id
    made = (await http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "a b\t"})).headers
    assert made["x-request-id"] != "a b"
    named = await http.post(TEXT, json={"prompt": "a", "request_id": "mine"})
    assert named.json()["id"] == "cmpl-mine"
    assert named.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("name", ["a\r\nset-cookie: a=1", "a\n", "\x00", "名前", "é", "x" * 129])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_unfit_request_id_never_reaches_the_header(http, engine, path, name):
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "a"}
    response = await http.post(path, json={**body, "request_id": name})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "request_id"
    assert response.headers["x-request-id"].isalnum()
    assert "set-cookie" not in response.headers
    assert engine.requests == []


async def test_one_request_id_may_run_twice_at_once(http, engine):
    for _ in range(2):
        await http.post(TEXT, json={"prompt": "a", "request_id": "same"})
    assert len({r.request_id for r in engine.requests}) == 2


async def test_deadline_is_the_shorter_of_header_and_field(http, engine):
    body = {"prompt": "a", "timeout": 50}
    await http.post(TEXT, json=body, headers={"x-request-timeout": "9.5"})
    await http.post(TEXT, json=body)
    await http.post(TEXT, json={"prompt": "a"})
    first, second, third = engine.timeouts
    assert 8 < first <= 9.5
    assert 48 < second <= 50
    assert third is None
    for wrong in ("soon", "nan", "-1", "0"):
        headers = {"x-request-timeout": wrong}
        assert (await http.post(TEXT, json=body, headers=headers)).status_code == 400


async def test_a_deadline_that_has_passed_is_408_without_retry(http):
    response = await http.post(TEXT, json={"prompt": "a", "timeout": 1e-9})
    assert response.status_code == 408
    assert response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "deadline_exceeded"


async def test_an_unforeseen_fault_shows_no_insides(app, engine, caplog):
    engine.raise_first = RuntimeError("secret at /srv/models/x.bin 0xdeadbeef12")
    async with http_client(app) as http:
        response = await http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "rid-7"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "rid-7" in response.json()["error"]["message"]
    assert response.headers["x-should-retry"] == "false"
    assert "rid-7" in caplog.text
    assert "Traceback" in caplog.text


async def test_tokenize_and_detokenize(http, engine):
    tokens = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert tokens["tokens"] == engine.tokenizer.encode("hé")
    assert tokens["count"] == 3
    assert tokens["max_model_len"] == 4096
    assert tokens["token_strs"][0] == "h"
    text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
    assert text == {"prompt": "hé"}
    chat = (await http.post("/tokenize", json={"messages": MESSAGES})).json()
    await http.post(CHAT, json={"messages": MESSAGES})
    assert chat["tokens"] == list(engine.requests[-1].prompt_token_ids)
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}),
        ("/detokenize", {"tokens": [260]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {}),
    ):
        await refusal(http, path, body)


async def test_max_completion_tokens_is_honoured(http, engine):
    body = {"messages": MESSAGES, "max_completion_tokens": 3}
    answer = (await http.post(CHAT, json=body)).json()
    assert answer["usage"]["completion_tokens"] == 3
