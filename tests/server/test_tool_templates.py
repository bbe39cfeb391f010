"""Tools and thinking over HTTP, for models whose templates have forms of their own."""

import dataclasses
import json

import pytest
from support.fake_engine import FakeEngine
from support.http_app import MESSAGES, http_client, make_app, sse_events
from support.tool_calls import ARGUMENTS, CALL, CHAT, MISTRAL, WEATHER, ask

from plait.adapters.info import AddedToken


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Write <tool_call>…</tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if thinks is defined %}"
    "{{ '<think>\n' if thinks else '<think>\n\n</think>\n\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
async def qwen(anyio_backend):
    """An engine and a client for a model whose template takes tools and thinks."""
    engine = FakeEngine()
    engine.tokenizer = engine.tokenizer.with_chat_template(QWEN)
    app = make_app(engine)
    async with app.router.lifespan_context(app), http_client(app, timeout=60) as client:
        yield engine, client


@pytest.mark.anyio
async def test_a_template_that_takes_tools_gets_them_and_arguments_as_objects(qwen):
    engine, client = qwen
    engine.reply = lambda _request, _index: CALL
    back = {"id": "x", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [back]},
        {"role": "tool", "tool_call_id": "x", "content": "rain"},
    ]
    (choice,) = (await ask(client, messages=messages)).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    prompt = engine.tokenizer.decode(engine.requests[-1].prompt_token_ids)
    assert prompt.startswith("system\n" + json.dumps(WEATHER)[:40])
    assert "<tool_call>Rome" in prompt
    assert "tool\nrain" in prompt


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kwargs", "reply"),
    [
        ({"thinks": True}, 'Hm, <b> "so".</think>\n\n{"a": 1}'),
        ({}, '<think>Hm, <b> "so".</think>\n{"a": 1}'),
        ({}, '{"a": 1}'),
        ({"thinks": False}, '{"a": 1}'),
    ],
)
async def test_thinking_is_told_apart_from_what_is_held(qwen, kwargs, reply, stream):
    engine, client = qwen
    engine.reply = lambda _request, _index: reply
    body = {
        "messages": MESSAGES,
        "chat_template_kwargs": kwargs,
        "response_format": {"type": "json_object"},
        "stream": stream,
    }
    response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    if stream:
        deltas = [c["delta"] for e in sse_events(response.content)[:-1] for c in e["choices"]]
        content = "".join(d.get("content") or "" for d in deltas)
        thinking = "".join(d.get("reasoning_content") or "" for d in deltas)
    else:
        message = response.json()["choices"][0]["message"]
        content, thinking = message["content"], message.get("reasoning_content", "")
    assert content == '{"a": 1}'
    assert thinking == ('Hm, <b> "so".' if "</think>" in reply else "")
    response = await client.post(CHAT, json=body | {"grammar": 'root ::= "a"'})
    assert response.status_code == 400


@pytest.mark.anyio
async def test_where_a_call_is_marked_by_a_special_token_its_text_is_read():
    """Without showing special tokens in what the client gets."""
    engine = FakeEngine()
    tokenizer = engine.tokenizer.extended(
        [AddedToken(token_id=260, text="[TOOL_CALLS]", special=True)]
    )
    engine.tokenizer = tokenizer.with_chat_template("{{ tools }}{{ messages }}[TOOL_CALLS]")
    model = dataclasses.replace(engine.config.model, vocab_size=261)
    engine.config = dataclasses.replace(engine.config, model=model)
    engine.reply = lambda _request, _index: f"Hi[TOOL_CALLS][{MISTRAL}]"
    app = make_app(engine)
    async with app.router.lifespan_context(app), http_client(app, timeout=60) as client:
        response = await ask(client, max_tokens=len(f"Hi#[{MISTRAL}]".encode()))
        assert response.status_code == 200, response.text
        message = response.json()["choices"][0]["message"]
        assert message["content"] == "Hi"
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        assert len(call["id"]) == 9
        assert engine.requests[-1].params.skip_special_tokens is False
