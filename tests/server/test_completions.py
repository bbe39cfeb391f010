"""/v1/completions: prompts in all forms, echo, legacy log-probabilities, what lm-eval sends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_engine import EOS, REPLY, FakeEngine
from support.http_app import http_client, make_app, openai_client, sse_events

pytestmark = pytest.mark.anyio
URL = "/v1/completions"


async def test_openai_client_gets_a_continuation(app, engine):
    async with openai_client(app) as client:
        answer = await client.completions.create(model="fake-model", prompt="Once", max_tokens=50)
        stream = await client.completions.create(
            model="fake-model", prompt="Once", max_tokens=50, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert answer.choices[0].text == REPLY
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert "".join(c.choices[0].text for c in chunks) == REPLY
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert list(engine.requests[0].prompt_token_ids) == engine.tokenizer.encode("Once")


async def test_sixteen_tokens_are_the_default(http):
    answer = (await http.post(URL, json={"prompt": "Once", "max_tokens": None})).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("ab", 1), ([97, 98], 1), (["ab", "c"], 2), ([[97, 98], [99], [100]], 3)],
)
async def test_prompt_forms(http, engine, prompt, num_prompts):
    engine.reply = lambda request, index: f"{request.prompt_token_ids[0]}/{index}"
    answer = (await http.post(URL, json={"prompt": prompt, "n": 2})).json()
    assert [c["index"] for c in answer["choices"]] == list(range(2 * num_prompts))
    expected = []
    for request in sorted(engine.requests, key=lambda r: r.request_id):
        expected += [f"{request.prompt_token_ids[0]}/{index}" for index in range(2)]
    assert [c["text"] for c in answer["choices"]] == expected
    assert len({r.request_id for r in engine.requests}) == num_prompts


async def test_several_prompts_stream_with_indices_by_prompt(http, engine):
    engine.reply = lambda request, index: f"{request.prompt_token_ids[0]}/{index}"
    body = {"prompt": [[65], [66]], "n": 2, "stream": True}
    events = sse_events((await http.post(URL, json=body)).content)
    texts = dict.fromkeys(range(4), "")
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == ["65/0", "65/1", "66/0", "66/1"]


async def test_what_lm_eval_sends(http, engine):
    prompts = [list(b"The sea"), list(b"A")]
    body = {
        "model": "fake-model",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = (await http.post(URL, json=body)).json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        for token, value, top in list(zip(*[logprobs[k] for k in _COLUMNS], strict=True))[1:]:
            assert top[token] == value
            greedy = max(top, key=top.get) == token
            assert greedy == (value == -0.5)  # the fake's even ids are the most likely ones


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs")


async def test_prompt_is_scored_without_generating(http):
    body = {"prompt": "héy", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = (await http.post(URL, json=body)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "héy"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert len(logprobs["tokens"]) == 4
    assert logprobs["text_offset"] == [0, 1, 1, 2]  # é is two tokens of one character
    assert answer["usage"]["completion_tokens"] == 0


async def test_text_offsets_point_into_the_text(http):
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 60}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    logprobs = choice["logprobs"]
    shown = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    for token, offset in shown:
        if not token.startswith("bytes:") and token != "<|eos|>":
            assert choice["text"][offset] == token
    assert choice["text"] == "ab" + REPLY
    assert shown[-1] == ("<|eos|>", len(choice["text"]))


async def test_echo_without_logprobs_repeats_the_prompt(http, engine):
    (choice,) = (await http.post(URL, json={"prompt": "ab", "echo": True})).json()["choices"]
    assert choice["text"].startswith("abGr")
    assert choice["logprobs"] is None
    ids = {"prompt": engine.tokenizer.encode("ab"), "echo": True}
    assert (await http.post(URL, json=ids)).json()["choices"][0]["text"].startswith("abGr")


@pytest.mark.parametrize("echo", [False, True])
async def test_streamed_choices_equal_the_whole(http, echo):
    body = {"prompt": ["ab", "é"], "n": 2, "echo": echo, "logprobs": 2, "max_tokens": 9}
    whole = (await http.post(URL, json=body)).json()["choices"]
    events = sse_events((await http.post(URL, json=body | {"stream": True})).content)
    for choice in whole:
        own = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        parts = [c["logprobs"] for c in own if c["logprobs"]]
        for key in (*_COLUMNS, "text_offset"):
            assert [x for part in parts for x in part[key]] == choice["logprobs"][key]


async def test_parts_of_characters_keep_their_own_names(http):
    body = {"prompt": "é", "echo": True, "logprobs": 0, "max_tokens": 0}
    (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["logprobs"]["tokens"] == [r"bytes:\xc3", r"bytes:\xa9"]


async def test_tokens_as_ids_never_collide(http):
    body = {"prompt": "a", "logprobs": 2, "max_tokens": 2, "return_tokens_as_token_ids": True}
    logprobs = (await http.post(URL, json=body)).json()["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in logprobs["tokens"])
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)


async def test_token_ids_come_back_for_each_choice(http, engine):
    body = {"prompt": ["ab", "c"], "max_tokens": 2, "return_token_ids": True}
    whole = (await http.post(URL, json=body)).json()["choices"]
    assert [c["prompt_token_ids"] for c in whole] == [
        engine.tokenizer.encode("ab"),
        engine.tokenizer.encode("c"),
    ]
    events = sse_events((await http.post(URL, json=body | {"stream": True})).content)[:-1]
    for choice in whole:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        assert [i for c in own for i in c.get("token_ids", [])] == choice["token_ids"]
        assert [c.get("prompt_token_ids") for c in own] == [choice["prompt_token_ids"], None]


async def test_one_failing_prompt_ends_all(http, engine):
    engine.fail_after = (1, RuntimeError("boom at /srv/secret/file.py"))
    response = await http.post(URL, json={"prompt": ["a", "b"]})
    assert response.status_code == 500
    assert engine.num_open == 0


async def test_sampling_fields_reach_the_engine(http, engine):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    lists = {"stop_token_ids": [EOS], "allowed_token_ids": [97, 98], "bad_words": ["x"]}
    body = {"prompt": "a", "logit_bias": {"97": 5}, "seed": -1, "priority": 3} | fields | lists
    assert (await http.post(URL, json=body)).status_code == 200
    request = engine.requests[0]
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert {name: list(getattr(request.params, name)) for name in lists} == lists
    assert request.params.logit_bias == {97: 5.0}
    assert request.params.seed == 2**64 - 1
    assert request.priority == 3
    assert request.bad_word_token_ids


# A special token's text in a reply is that token, which is not shown.
@settings(max_examples=30, deadline=None)
@given(
    reply=st.text(max_size=20).filter(lambda text: "<|" not in text),
    prompt=st.text(min_size=1, max_size=10),
)
def test_offsets_rise_and_stay_inside_the_text(reply, prompt):
    import anyio

    anyio.run(_check_offsets, reply, prompt)


async def _check_offsets(reply, prompt):
    engine = FakeEngine()
    engine.reply = lambda _request, _index: reply
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 200}
    async with http_client(make_app(engine)) as http:
        (choice,) = (await http.post(URL, json=body)).json()["choices"]
    assert choice["text"] == prompt + reply
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(choice["text"])
