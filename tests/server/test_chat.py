"""/v1/chat/completions, through the openai client and byte by byte."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import REPLY, FakeEngine, make_config
from support.http_app import MESSAGES, http_client, make_app, openai_client, sse_events

pytestmark = pytest.mark.anyio


async def test_openai_client_gets_an_answer(app, engine):
    async with openai_client(app) as client:
        answer = await client.chat.completions.create(
            model="fake-model", messages=MESSAGES, temperature=0, seed=7, stop=["never"]
        )
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert engine.tokenizer.encode(prompt) == list(engine.requests[0].prompt_token_ids)
    usage = answer.usage
    assert usage.prompt_tokens == len(engine.requests[0].prompt_token_ids)
    assert usage.completion_tokens == len(REPLY.encode()) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert engine.requests[0].params.seed == 7
    assert engine.requests[0].params.greedy


async def test_max_tokens_defaults_to_what_the_context_leaves(http, engine):
    await http.post("/v1/chat/completions", json={"messages": MESSAGES})
    request = engine.requests[0]
    assert request.params.max_tokens + len(request.prompt_token_ids) == 4096


async def test_openai_client_streams(app):
    async with openai_client(app) as client:
        stream = await client.chat.completions.create(
            model="fake-model",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content is None
    texts = [c.choices[0].delta.content for c in chunks if c.choices]
    assert "".join(filter(None, texts)) == REPLY
    assert "" not in texts
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(REPLY.encode()) + 1
    assert len({c.id for c in chunks}) == 1


async def test_langchain_invokes_and_streams(app, monkeypatch):
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    langchain_openai = pytest.importorskip("langchain_openai")
    async with http_client(app) as http:
        model = langchain_openai.ChatOpenAI(
            model="fake-model",
            api_key="none",
            base_url="http://plait.test/v1",
            http_async_client=http,
            stream_usage=True,
        )
        answer = await model.ainvoke("Hello")
        assert answer.content == REPLY
        chunks = [chunk async for chunk in model.astream("Hello")]
    assert "".join(chunk.content for chunk in chunks) == REPLY
    assert chunks[-1].usage_metadata or any(chunk.usage_metadata for chunk in chunks)


async def test_stream_is_framed_and_ends_with_done(http):
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 3}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    events = sse_events(response.content)
    assert events[-1] == "[DONE]"
    first, *deltas = [event["choices"][0] for event in events[:-1]]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant"},
        "logprobs": None,
        "finish_reason": None,
    }
    assert [d["delta"]["content"] for d in deltas] == ["G", "r", "\ufffd"]  # ü, cut by max_tokens
    assert [d["finish_reason"] for d in deltas] == [None, None, "length"]
    assert all("usage" not in event for event in events[:-1])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("continuous", [False, True])
async def test_usage_in_streams_comes_as_asked(http, include, continuous):
    options = {"include_usage": include, "continuous_usage_stats": continuous}
    body = {"messages": MESSAGES, "stream": True, "stream_options": options}
    events = sse_events((await http.post("/v1/chat/completions", json=body)).content)[:-1]
    with_choices = [e for e in events if e["choices"]]
    assert all(("usage" in e) == continuous for e in with_choices)
    assert (events[-1]["choices"] == []) == include
    if include or continuous:
        assert events[-1]["usage"]["completion_tokens"] == len(REPLY.encode()) + 1
    if continuous:
        counts = [e["usage"]["completion_tokens"] for e in with_choices]
        assert counts == sorted(counts)
        assert counts[0] == 1


async def test_several_answers_stream_interleaved(http, engine):
    engine.reply = lambda _request, index: f"answer {index}"
    body = {"messages": MESSAGES, "n": 3, "stream": True}
    events = sse_events((await http.post("/v1/chat/completions", json=body)).content)[:-1]
    choices = [e["choices"][0] for e in events]
    for index in range(3):
        own = [c for c in choices if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant"}
        assert sum("role" in c["delta"] for c in own) == 1
        assert "".join(c["delta"].get("content", "") for c in own) == f"answer {index}"
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
    order = [c["index"] for c in choices if c["delta"].get("content")]
    assert order[:6] == [0, 1, 2, 0, 1, 2]


async def test_several_answers_without_stream_count_the_prompt_once(http, engine):
    engine.reply = lambda _request, index: "x" * (index + 1)
    body = {"messages": MESSAGES, "n": 2}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["x", "xx"]
    assert answer["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == 5


async def test_several_tokens_in_one_event_make_one_chunk(http, engine):
    engine.split = lambda num_tokens: [num_tokens]
    body = {"messages": MESSAGES, "stream": True}
    events = sse_events((await http.post("/v1/chat/completions", json=body)).content)
    assert len(events) == 3  # role, everything with its finish reason, [DONE]
    assert events[1]["choices"][0]["delta"]["content"] == REPLY
    assert events[1]["choices"][0]["finish_reason"] == "stop"


async def test_stop_string_is_named_and_cut(http):
    body = {"messages": MESSAGES, "stop": ["all of"]}
    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["message"]["content"] == "Grüße 👋🏽, "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "all of")


async def test_logprobs_have_tokens_bytes_and_alternatives(http):
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    assert bytes(b for entry in content for b in entry["bytes"]) == "Grü".encode()
    assert content[0]["token"] == "G"
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert {entry["logprob"] for entry in content} <= {-0.5, -1.5}


async def test_streamed_logprobs_equal_the_whole(http):
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    response = await http.post("/v1/chat/completions", json=body | {"stream": True})
    choices = [e["choices"][0] for e in sse_events(response.content)[:-1]]
    streamed = [x for c in choices if c["logprobs"] for x in c["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]


async def test_prompt_logprobs_in_vllm_form(http, engine):
    body = {"messages": MESSAGES, "prompt_logprobs": 1, "max_tokens": 1}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    ids = engine.requests[0].prompt_token_ids
    entries = answer["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(ids)
    assert all(str(token) in entry for token, entry in zip(ids[1:], entries[1:], strict=True))
    assert set(entries[1][str(ids[1])]) == {"logprob", "rank", "decoded_token"}


async def test_minus_infinity_is_written_as_a_number(http):
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "max_tokens": 2}
    choice = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    logprobs = [t["logprob"] for e in choice["logprobs"]["content"] for t in e["top_logprobs"]]
    assert -9999.0 in logprobs


async def test_token_ids_come_back_on_request(http, engine):
    body = {"messages": MESSAGES, "return_token_ids": True, "max_tokens": 5}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    ids = engine.tokenizer.encode(REPLY, add_special_tokens=False)[:5]
    assert whole["choices"][0]["token_ids"] == ids
    assert whole["prompt_token_ids"] == list(engine.requests[0].prompt_token_ids)
    response = await http.post("/v1/chat/completions", json=body | {"stream": True})
    events = sse_events(response.content)[:-1]
    assert [i for e in events for i in e["choices"][0].get("token_ids", [])] == ids
    assert sum("prompt_token_ids" in e for e in events) == 1


async def test_final_message_is_continued_and_echoed(http, engine):
    messages = [*MESSAGES, {"role": "assistant", "content": "I say: "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    assert whole["choices"][0]["message"]["content"] == "I say: " + REPLY
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nI say: ")
    response = await http.post("/v1/chat/completions", json=body | {"stream": True})
    deltas = [e["choices"][0]["delta"] for e in sse_events(response.content)[:-1]]
    assert "".join(d.get("content", "") for d in deltas) == "I say: " + REPLY


async def test_text_parts_and_developer_role_reach_the_template(http, engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts}]
    response = await http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert "<|im_start|>system\nBe brief<|im_end|>" in prompt
    assert "user\none\ntwo<|im_end|>" in prompt


async def test_template_arguments_only_where_the_template_reads_them(http, engine):
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = engine.tokenizer.decode(engine.requests[0].prompt_token_ids)
    assert prompt.endswith("<think>")
    body["chat_template_kwargs"] = {"enable_thought": True}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "enable_thinking" in response.json()["error"]["message"]


async def test_history_with_an_sdk_message_is_taken_back(app):
    async with openai_client(app) as client:
        first = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
        history = [*MESSAGES, first.choices[0].message.model_dump(), *MESSAGES]
        second = await client.chat.completions.create(model="fake-model", messages=history)
    assert second.choices[0].message.content == REPLY


async def test_truncation_only_on_request(engine):
    engine.config = make_config(max_model_len=100)
    messages = [{"role": "user", "content": "x" * 500}]
    async with http_client(make_app(engine)) as http:
        refused = await http.post("/v1/chat/completions", json={"messages": messages})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "100" in error["message"]
        body = {"messages": messages, "truncate_prompt_tokens": 20, "max_tokens": 5}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert len(engine.requests[-1].prompt_token_ids) == 20
        body["truncate_prompt_tokens"] = -1
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        assert len(engine.requests[-1].prompt_token_ids) == 95


@settings(max_examples=60, deadline=None)
@given(
    reply=st.text(max_size=30),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=40),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2),
)
def test_streamed_text_equals_whole_text(reply, sizes, stop):
    import anyio

    anyio.run(_compare_stream_with_whole, reply, sizes, stop)


async def _compare_stream_with_whole(reply, sizes, stop):
    engine = FakeEngine()
    engine.reply = lambda _request, _index: reply

    def split(num_tokens):
        cut = []
        while sum(cut) < num_tokens:
            cut.append(min(sizes[len(cut) % len(sizes)], num_tokens - sum(cut)))
        return cut

    engine.split = split
    body = {"messages": MESSAGES, "stop": stop}
    async with http_client(make_app(engine)) as http:
        whole = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        response = await http.post("/v1/chat/completions", json=body | {"stream": True})
    choices = [e["choices"][0] for e in sse_events(response.content)[:-1]]
    assert "".join(c["delta"].get("content", "") for c in choices) == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert choices[-1].get("stop_reason") == whole.get("stop_reason")
