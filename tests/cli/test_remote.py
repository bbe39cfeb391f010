"""What `--url` sends and reads, over a transport that answers in this process."""

import json

import httpx
import pytest

from plait.platform.cli.remote import RemoteAnswerer
from plait.platform.core import SamplingParams
from plait.platform.errors import ContextLengthExceeded, EngineDied


def sse(*chunks) -> str:
    return "".join(f"data: {c if isinstance(c, str) else json.dumps(c)}\n\n" for c in chunks)


@pytest.fixture
def server(monkeypatch):
    """Install a reply; returns the list of requests made."""
    asked: list[httpx.Request] = []

    def install(reply: httpx.Response) -> list[httpx.Request]:
        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return reply

        client = httpx.Client
        transport = httpx.MockTransport(handle)
        monkeypatch.setattr(httpx, "Client", lambda **kw: client(transport=transport, **kw))
        return asked

    return install


def answerer() -> RemoteAnswerer:
    return RemoteAnswerer("http://server:1/v1/", model="m", api_key="secret")


def test_a_stream_becomes_pieces_and_only_what_differs_is_sent(server):
    role = {"choices": [{"delta": {"role": "assistant"}}]}
    text = {"choices": [{"delta": {"content": "hé"}}]}
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
    body = ": comment\n\n" + sse(role, text, end, usage, "[DONE]")
    asked = server(httpx.Response(200, text=body))
    params = SamplingParams(max_tokens=None, top_k=5)
    pieces = list(answerer().chat([{"role": "user", "content": "x"}], params))
    assert [p.text for p in pieces] == ["", "hé", "", ""]
    assert pieces[2].finish_reason == "stop"
    assert (pieces[3].num_prompt_tokens, pieces[3].num_output_tokens) == (5, 2)
    (request,) = asked
    assert str(request.url) == "http://server:1/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer secret"
    sent = json.loads(request.content)
    assert sent["top_k"] == 5
    assert not {"max_tokens", "min_p", "seed", "stop", "repetition_penalty"} & set(sent)


def test_a_refusal_keeps_the_servers_words_and_code(server):
    error = {"error": {"message": "9 tokens > 8", "code": "context_length_exceeded"}}
    server(httpx.Response(400, json=error))
    with pytest.raises(ContextLengthExceeded, match="9 tokens > 8"):
        list(answerer().complete("x", SamplingParams()))


def test_an_error_within_the_stream_is_raised(server):
    text = {"choices": [{"text": "a"}]}
    error = {"error": {"message": "engine restarted", "code": "engine_unavailable"}}
    server(httpx.Response(200, text=sse(text, error)))
    with pytest.raises(EngineDied, match="engine restarted"):
        list(answerer().complete("x", SamplingParams()))


def test_a_stream_that_just_ends_is_not_taken_for_an_answer(server):
    server(httpx.Response(200, text=sse({"choices": [{"text": "a"}]})))
    with pytest.raises(EngineDied, match="before the answer's end"):
        list(answerer().complete("x", SamplingParams()))
