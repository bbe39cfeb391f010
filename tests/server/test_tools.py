"""Tools over HTTP: the prompt, the grammar's wishes, calls whole and streamed."""

import json

import pytest
from support.fake_engine import FakeEngine
from support.http_app import BASE_URL, MESSAGES, http_client, make_app, sse_events
from support.tool_calls import ARGUMENTS, CALL, CHAT, WEATHER, WEATHER_CALL, ask

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
