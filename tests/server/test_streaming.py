"""Streams over time: flushing, silence, failures, and clients that go away."""

import asyncio

import openai
import pytest
from support.fake_engine import FakeEngine
from support.http_app import (
    MESSAGES,
    Connection,
    http_client,
    make_app,
    openai_client,
    sse_events,
)

from plait.platform.core import Event, FinishReason
from plait.platform.errors import EngineDied, Overloaded

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
STREAM = {"messages": MESSAGES, "stream": True}


def failed(code, message):
    return Event(request_id="", index=0, finish_reason=FinishReason.ERROR, error=(code, message))


@pytest.fixture
def gated(engine):
    engine.gate = asyncio.Event()
    return engine


async def test_each_token_is_sent_at_once(app, gated):
    async with Connection(app, CHAT, STREAM) as connection:
        start = await connection.next_message()
        assert start["type"] == "http.response.start"
        assert start["status"] == 200
        assert b'"role":"assistant"' in (await connection.next_message())["body"]
        assert b'"content":"G"' in (await connection.next_message())["body"]
        await asyncio.sleep(0)
        assert connection.sent.empty()
        gated.gate.set()
        assert b'"content":"r"' in (await connection.next_message())["body"]


async def test_client_that_leaves_a_stream_aborts_it(app, gated):
    async with Connection(app, CHAT, STREAM) as connection:
        for _ in range(3):
            await connection.next_message()
        assert gated.num_open == 1
        connection.hang_up()
        await connection.ended()
    assert gated.num_open == 0
    assert gated.aborted == [gated.requests[0].request_id]
    assert app.state.context.admission.in_flight == 0


async def test_client_that_leaves_before_an_answer_aborts_it(app, gated):
    async with Connection(app, CHAT, {"messages": MESSAGES}) as connection:
        while not gated.num_open:
            await asyncio.sleep(0.001)
        connection.hang_up()
        await connection.ended()
        assert connection.sent.empty()
    assert gated.aborted == [gated.requests[0].request_id]
    assert app.state.context.admission.in_flight == 0


async def test_leaving_aborts_every_prompt_of_a_request(app, gated):
    body = {"prompt": ["a", "b", "c"], "stream": True}
    async with Connection(app, "/v1/completions", body) as connection:
        while gated.num_open < 3:
            await asyncio.sleep(0.001)
        connection.hang_up()
        await connection.ended()
    assert len(gated.aborted) == 3
    assert gated.num_open == 0


async def test_a_finished_answer_aborts_nothing(http, engine):
    await http.post(CHAT, json=STREAM)
    await http.post(CHAT, json={"messages": MESSAGES})
    assert engine.aborted == []


async def test_silence_is_filled_with_comments(gated):
    app = make_app(gated, keep_alive_interval_s=0.01)
    async with Connection(app, CHAT, STREAM) as connection:
        for _ in range(3):
            await connection.next_message()
        for _ in range(2):
            assert (await connection.next_message())["body"] == b": keep-alive\n\n"
        gated.gate.set()
        rest = b""
        while (message := await connection.next_message())["more_body"]:
            rest += message["body"]
        assert sse_events(rest)[-1] == "[DONE]"


async def test_headers_are_sent_though_no_token_comes(engine):
    class Slow(FakeEngine):
        async def stream(self, request, *, timeout_s=None):
            await gate.wait()
            raise EngineDied("the engine restarted; send it again")
            yield

    gate = asyncio.Event()
    app = make_app(Slow(), header_delay_s=0.01)
    async with Connection(app, CHAT, STREAM) as connection:
        assert (await connection.next_message())["status"] == 200
        gate.set()
        body = (await connection.next_message())["body"]
    (event,) = sse_events(body)
    assert event["error"]["code"] == "engine_unavailable"


async def test_early_error_has_its_own_status(http, engine):
    engine.raise_first = Overloaded("the queue is full", retry_after_s=3.2)
    response = await http.post(CHAT, json=STREAM)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "4"
    assert response.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (failed("internal_error", "NaN in the logits"), "internal_error"),
        (failed("deadline_exceeded", "too late"), "deadline_exceeded"),
        (EngineDied("the engine died"), "engine_unavailable"),
        (RuntimeError("bug at 0x7f00dead in /srv/app.py"), "internal_error"),
        (Event(request_id="", index=0, finish_reason=FinishReason.ABORT), "aborted"),
    ],
)
async def test_error_inside_a_stream_is_its_last_event(http, engine, fault, code):
    engine.fail_after = (2, fault)
    response = await http.post(CHAT, json=STREAM)
    assert response.status_code == 200
    events = sse_events(response.content)
    assert events[-1]["error"]["code"] == code
    assert "[DONE]" not in events
    assert "/srv" not in response.text
    assert "0x7f00dead" not in response.text
    assert engine.num_open == 0


async def test_openai_client_raises_on_an_error_inside_a_stream(app, engine):
    engine.fail_after = (2, EngineDied("the engine died"))
    async with openai_client(app) as client:
        stream = await client.chat.completions.create(
            model="fake-model", messages=MESSAGES, stream=True
        )
        with pytest.raises(openai.APIError, match="the engine died"):
            async for _ in stream:
                pass


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (failed("internal_error", "NaN in the logits"), 500),
        (failed("deadline_exceeded", "too late"), 408),
        (EngineDied("the engine died"), 503),
        (Event(request_id="", index=0, finish_reason=FinishReason.ABORT), 503),
    ],
)
async def test_failure_of_a_whole_answer_has_a_status(http, engine, fault, status):
    engine.fail_after = (2, fault)
    response = await http.post(CHAT, json={"messages": MESSAGES})
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    retried = response.headers.get("x-should-retry") != "false"
    assert retried == (status == 503)


async def test_a_stream_that_ends_too_early_is_an_error(http, engine):
    engine.fail_after = None
    full = engine._interleaved
    engine._interleaved = lambda request: list(full(request))[:2]
    events = sse_events((await http.post(CHAT, json=STREAM)).content)
    assert events[-1]["error"]["code"] == "internal_error"


async def test_many_streams_at_once(engine):
    app = make_app(engine)
    engine.config = engine.config  # 64 running and 64 queued
    async with http_client(app) as http:
        responses = await asyncio.gather(*(http.post(CHAT, json=STREAM) for _ in range(100)))
    assert all(sse_events(r.content)[-1] == "[DONE]" for r in responses)
    assert app.state.context.admission.in_flight == 0
