"""Tools over HTTP: the prompt, the grammar's wishes, calls whole and streamed."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import FakeEngine
from support.http_app import BASE_URL, MESSAGES, http_client, make_app, sse_events

from plait.adapters.info import AddedToken
from plait.structured.tools import formats
from plait.structured.tools.parser import Reply, ReplyParser

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Of a city", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ARGUMENTS = '{"city": "Paris {\\"} é"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def tool_engine():
    return FakeEngine()


@pytest.fixture(scope="module")
async def served(tool_engine, anyio_backend):
    app = make_app(tool_engine)
    async with app.router.lifespan_context(app), http_client(app, timeout=60) as client:
        yield client


# --- the reader ---


def read(form, pieces, thinking=False, ended=("stop", None)):
    ids = map("call_{}".format, itertools.count())
    parser = ReplyParser(form, thinking=thinking, new_id=lambda: next(ids))
    reply, deltas = Reply(), []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.end(*ended)
    for delta in deltas:
        reply.add(delta)
    return reply, deltas


def seen(reply):
    calls = [(call.id, call.name, call.arguments) for call in reply.calls]
    return reply.content, reply.reasoning, calls


LLAMA = f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'
MISTRAL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
REPLIES = [
    (formats.HERMES, False, f"Let me <b>see</b>. {CALL}\n{CALL}"),
    (formats.HERMES, False, "No <tool_ call {} at all <"),
    (formats.HERMES, True, f"I think <tool_call> so</think>\n\n{CALL}"),
    (formats.HERMES, None, f"<think>hm</think>\n\nWell. {CALL}"),
    (formats.HERMES, None, f"<thin {CALL}"),
    (formats.HERMES, False, CALL[:-14]),
    (formats.HERMES, False, CALL[:20]),
    (formats.HERMES, False, f"{CALL}\n{CALL[:25]}"),
    (formats.LLAMA, False, LLAMA),
    (formats.LLAMA, False, f"As text: {LLAMA}"),
    (formats.MISTRAL, False, f"Hi[TOOL_CALLS][{MISTRAL}, {MISTRAL}]"),
    (
        formats.MISTRAL_ARGS,
        False,
        f"[TOOL_CALLS]clock[ARGS]{{}}[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}",
    ),
    (None, True, "thinking</thi</think>\n{}"),
]
WEATHER_CALL = ("get_weather", ARGUMENTS)


@pytest.mark.parametrize(("form", "thinking", "text"), REPLIES)
def test_replies_read_the_same_however_they_are_cut(form, thinking, text):
    whole = seen(read(form, [text], thinking)[0])
    for at in range(len(text) + 1):
        assert seen(read(form, [text[:at], text[at:]], thinking)[0]) == whole
    assert seen(read(form, text, thinking)[0]) == whole


@given(st.sampled_from(REPLIES), st.lists(st.integers(1, 9), min_size=1, max_size=40))
@settings(deadline=None, max_examples=150)
def test_replies_in_random_pieces_keep_the_contract_of_deltas(case, sizes):
    form, thinking, text = case
    pieces, rest = [], text
    for size in itertools.cycle(sizes):
        if not rest:
            break
        pieces.append(rest[:size])
        rest = rest[size:]
    reply, deltas = read(form, pieces, thinking)
    assert seen(reply) == seen(read(form, [text], thinking)[0])
    calls = [delta.call for delta in deltas if delta.call is not None]
    for index in range(len(reply.calls)):
        own = [call for call in calls if call.index == index]
        assert own[0].id is not None
        assert own[0].name is not None
        assert all(call.id is None and call.name is None for call in own[1:])
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    kinds = [bool(d.content) + bool(d.reasoning) + (d.call is not None) for d in deltas]
    assert kinds == [1] * len(kinds)


def test_each_format_gives_its_content_thinking_and_calls():
    found = [
        (content, reasoning, [call[1:] for call in calls])
        for content, reasoning, calls in (seen(read(f, [t], k)[0]) for f, k, t in REPLIES)
    ]
    assert found == [
        ("Let me <b>see</b>. ", "", [WEATHER_CALL] * 2),
        ("No <tool_ call {} at all <", "", []),
        ("", "I think <tool_call> so", [WEATHER_CALL]),
        ("Well. ", "hm", [WEATHER_CALL]),
        ("<thin ", "", [WEATHER_CALL]),
        ("", "", [WEATHER_CALL]),
        (CALL[:20], "", []),
        ("", "", [WEATHER_CALL]),
        ("", "", [WEATHER_CALL]),
        (f"As text: {LLAMA}", "", []),
        ("Hi", "", [WEATHER_CALL] * 2),
        ("", "", [("clock", "{}"), WEATHER_CALL]),
        ("{}", "thinking</thi", []),
    ]


@pytest.mark.parametrize("form", [*{form.name: form for form, _, _ in REPLIES if form}.values()])
def test_a_reply_cut_anywhere_shows_no_markup(form):
    """Content is that of the whole reply, or a beginning of it, however the pieces come."""
    for own, thinking, text in REPLIES:
        if own is not form or thinking is not False:
            continue
        content = seen(read(form, [text])[0])[0]
        if content == CALL[:20]:  # as text, only where it has ended by itself
            content = ""
        for at in range(len(text) + 1):
            whole = seen(read(form, [text[:at]], ended=("length", None))[0])
            assert content.startswith(whole[0])
            assert seen(read(form, text[:at], ended=("length", None))[0]) == whole
            if at < len(content):
                assert form.open.startswith(content[len(whole[0]) : at])


@pytest.mark.parametrize(
    ("text", "thinking", "ended", "content", "reasoning"),
    [
        (CALL[:20], False, ("length", None), "", ""),
        ("a <tool", False, ("length", None), "a ", ""),
        ("a <tool", False, ("stop", None), "a <tool", ""),
        ("a <tool", False, ("stop", 7), "a ", ""),
        ("a <tool_", False, ("stop", "call"), "a ", ""),
        ("a <tool_call", False, ("stop", "call"), "a ", ""),
        ("a <", False, ("stop", "b>"), "a <", ""),
        ("a <", False, ("stop", "th"), "a <", ""),
        ("<", None, ("stop", "th"), "", ""),
        ("<thi", None, ("length", None), "", ""),
        ("hm</th", True, ("length", None), "", "hm"),
        ("hm<tool", True, ("length", None), "", "hm<tool"),
    ],
)
def test_what_may_be_a_mark_is_text_only_where_it_cannot_go_on(
    text, thinking, ended, content, reasoning
):
    found = seen(read(formats.HERMES, text, thinking, ended)[0])
    assert found == (content, reasoning, [])


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("{% for t in tools %}<tools>{% endfor %}<tool_call>{}</tool_call>", formats.HERMES),
        ('<|start_header_id|>{"name": n, "parameters": p} {{ tools }}', formats.LLAMA),
        ("[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]", formats.MISTRAL),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", formats.MISTRAL_ARGS),
        ("{{ tools }}<tool_call><function=name>", None),
        ("{{ messages }}", None),
    ],
)
def test_formats_are_known_by_the_template(text, form):
    assert formats.detect(text) is form


# --- requests ---


async def ask(client, **fields):
    return await client.post(CHAT, json={"messages": MESSAGES, "tools": [WEATHER, CLOCK]} | fields)


@pytest.mark.anyio
async def test_a_call_is_answered_whole(served, tool_engine):
    tool_engine.reply = lambda _request, _index: f"Sure. {CALL}"
    answer = (await ask(served)).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert json.loads(call["function"]["arguments"]) == {"city": 'Paris {"} é'}
    assert choice["message"]["content"] == "Sure. "
    tool_engine.reply = lambda _request, _index: CALL
    assert (await ask(served)).json()["choices"][0]["message"]["content"] is None


@pytest.mark.anyio
async def test_streamed_calls_join_to_the_whole_ones(served, tool_engine):
    tool_engine.reply = lambda _request, _index: f"Sure. {CALL}\n{CALL}"
    whole = (await ask(served, n=2)).json()["choices"]
    response = await ask(served, n=2, stream=True)
    joined = [{"content": "", "calls": {}, "finish": None} for _ in range(2)]
    for event in sse_events(response.content)[:-1]:
        for choice in event["choices"]:
            one, delta = joined[choice["index"]], choice["delta"]
            one["content"] += delta.get("content") or ""
            one["finish"] = choice["finish_reason"] or one["finish"]
            for call in delta.get("tool_calls") or []:
                known = one["calls"].setdefault(call["index"], {"arguments": ""})
                for key in ("id", "type"):
                    assert key not in call or key not in known
                    known |= {key: call[key]} if key in call else {}
                if "name" in call["function"]:
                    assert "name" not in known
                    known["name"] = call["function"]["name"]
                known["arguments"] += call["function"]["arguments"]
                assert known["id"]
    for one, choice in zip(joined, whole, strict=True):
        assert one["content"] == choice["message"]["content"]
        assert one["finish"] == choice["finish_reason"] == "tool_calls"
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [
            {"name": call["name"], "arguments": call["arguments"]} for call in one["calls"].values()
        ] == functions


@pytest.mark.anyio
async def test_an_answer_cut_within_a_call_says_length(served, tool_engine):
    tool_engine.reply = lambda _request, _index: CALL
    for num_tokens in range(1, len(CALL)):
        if num_tokens % 7:
            continue
        (choice,) = (await ask(served, max_tokens=num_tokens)).json()["choices"]
        assert choice["finish_reason"] == "length"
        for call in choice["message"].get("tool_calls", []):
            assert ARGUMENTS.startswith(call["function"]["arguments"])


@pytest.mark.anyio
@pytest.mark.parametrize(
    "fields",
    [{"stop": "call"}, {"stop": "get"}, {"stop": "call", "include_stop_str_in_output": True}]
    + [{"max_tokens": n} for n in (5, 6, 17, 18, 25, 40)],
)
async def test_an_answer_cut_within_a_header_shows_none_of_it_streamed_or_not(
    served, tool_engine, fields
):
    tool_engine.reply = lambda _request, _index: f"Sure {CALL}"
    (choice,) = (await ask(served, **fields)).json()["choices"]
    assert choice["message"]["content"] == "Sure "
    assert "tool_calls" not in choice["message"] or fields.get("max_tokens") == 40
    assert choice["finish_reason"] == ("stop" if "stop" in fields else "length")
    streamed = sse_events((await ask(served, stream=True, **fields)).content)[:-1]
    (parts,) = zip(*(event["choices"] for event in streamed), strict=True)
    assert "".join(part["delta"].get("content") or "" for part in parts) == "Sure "
    assert parts[-1]["finish_reason"] == choice["finish_reason"]


@pytest.mark.anyio
async def test_the_model_is_told_of_its_tools_and_of_the_conversation(served, tool_engine):
    tool_engine.reply = lambda _request, _index: "It is sunny."
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
    ]
    await ask(served, messages=messages)
    prompt = tool_engine.tokenizer.decode(
        tool_engine.requests[-1].prompt_token_ids, skip_special_tokens=False
    )
    system, rest = prompt.split("<|im_end|>", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    for part in ("get_weather", "clock", "Of a city", "<tool_call>"):
        assert part in system
    assert '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>' in rest
    assert rest.count("<|im_start|>user") == 2
    assert "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nsun" in rest
    # Without tools the conversation is shown all the same.
    response = await served.post(CHAT, json={"messages": messages})
    assert response.status_code == 200
    assert tool_engine.requests[-1].grammar is None


@pytest.mark.anyio
async def test_with_tool_choice_none_no_tool_is_shown_and_nothing_is_held(served, tool_engine):
    await ask(served, tool_choice="none")
    request = tool_engine.requests[-1]
    assert request.grammar is None
    assert "get_weather" not in tool_engine.tokenizer.decode(request.prompt_token_ids)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("choice", "legal", "illegal"),
    [
        ("auto", ["hello", CALL, f"a {CALL}\n{CALL}"], [CALL.replace("get_", "set_")]),
        ("required", [CALL, f"{CALL}\n{CALL}"], ["hello", f"a {CALL}"]),
        (NAMED, [CLOCK_CALL], [CALL, "a", f"{CLOCK_CALL}\n{CLOCK_CALL}"]),
        (allowed("auto", "clock"), ["hello"], [CALL]),
        (allowed("required", "get_weather"), [CALL], ["hello"]),
    ],
)
async def test_the_grammar_holds_to_the_choice(served, tool_engine, choice, legal, illegal):
    from plait.structured.matcher import MatcherStore
    from plait.structured.vocabulary import Vocabulary

    assert (await ask(served, tool_choice=choice)).status_code == 200
    grammar = tool_engine.requests[-1].grammar
    vocabulary = Vocabulary.of_model(tool_engine.tokenizer, tool_engine.config.model)

    def accepts(text):
        matcher = MatcherStore().open(grammar, vocabulary)
        tokens = tool_engine.tokenizer.encode(text, add_special_tokens=False)
        return all(map(matcher.accept, tokens)) and matcher.can_end

    assert all(map(accepts, legal))
    assert not any(map(accepts, illegal))


@pytest.mark.anyio
async def test_arguments_that_no_grammar_holds_are_told_or_refused_if_strict(served, tool_engine):
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": r"(x)\1"}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    tool_engine.reply = lambda _request, _index: "hello"
    answer = (await ask(served, tools=[WEATHER, tool])).json()
    (warning,) = answer["warnings"]
    assert "'odd'" in warning
    assert "/properties/a/pattern" in warning
    tool["function"]["strict"] = True
    response = await ask(served, tools=[WEATHER, tool])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools[1].function.parameters"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER | {"function": {"name": "a", "x": 1}}]}, "tools[0].function"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": allowed("auto", "x")}, "tool_choice.allowed_tools.tools[0]"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
        (
            {
                "messages": [
                    *MESSAGES,
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "a", "arguments": "{"}}],
                    },
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
async def test_wrong_tools_are_refused_by_name(served, fields, param):
    response = await ask(served, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.anyio
async def test_openai_client_gets_calls_streamed_and_whole(tool_engine):
    import openai

    app = make_app(tool_engine)
    tool_engine.reply = lambda _request, _index: CALL
    async with app.router.lifespan_context(app), http_client(app, timeout=60) as http:
        client = openai.AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key="none", http_client=http)
        answer = await client.chat.completions.create(
            model="fake-model", messages=MESSAGES, tools=[WEATHER]
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.arguments == ARGUMENTS
        async with client.chat.completions.stream(
            model="fake-model", messages=MESSAGES, tools=[WEATHER]
        ) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == WEATHER_CALL


# --- templates of their own ---

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
async def test_where_a_call_is_marked_by_a_special_token_its_text_is_read(tool_engine):
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
