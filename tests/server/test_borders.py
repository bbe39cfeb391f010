"""Keys, bounds on the HTTP message, admission, health, metrics: what stands around a request."""

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator

import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from support.fake_engine import FakeEngine, make_config
from support.http_app import MESSAGES, Connection, http_client, make_app, sse_events

from plait.platform.messages import Stats
from plait.platform.server.access import Access
from plait.platform.server.admission import DrainRate
from plait.platform.server.errors import sanitise
from plait.platform.server.metrics import LagMeter
from plait.platform.server.settings import Limits

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEYS = ("first-key", "second-kéy")


def routes(app):
    """Every registered path with a method, whatever kind of route it is."""
    found = [("/openapi.json", "GET")]
    stack = list(app.routes)
    while stack:
        route = stack.pop()
        stack.extend(getattr(getattr(route, "original_router", None), "routes", []))
        if isinstance(route, APIRoute):
            found += [(route.path.replace("{model_id:path}", "x"), m) for m in route.methods]
    return found


def test_route_discovery_finds_all_families(app):
    paths = {path for path, _ in routes(app)}
    assert paths >= {
        *(CHAT, TEXT, "/v1/models", "/v1/models/x", "/tokenize", "/detokenize"),
        *("/health", "/ready", "/version", "/load", "/metrics", "/openapi.json"),
    }


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}])
async def test_every_route_needs_a_key_but_health_and_ready(engine, headers):
    app = make_app(engine, api_keys=KEYS)
    async with http_client(app, headers=headers) as http:
        for path, method in [*routes(app), ("/nowhere", "GET"), ("/health/", "GET")]:
            response = await http.request(method, path)
            open_to_all = path in ("/health", "/ready")
            assert response.status_code == (200 if open_to_all else 401), path
            if not open_to_all:
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
    assert engine.requests == []


@pytest.mark.parametrize("key", KEYS)
async def test_each_key_opens_in_both_headers(engine, key):
    app = make_app(engine, api_keys=KEYS)
    async with http_client(app) as http:
        for headers in (
            {"authorization": b"bearer " + key.encode()},
            {"authorization": b"Basic abc", "x-api-key": key.encode()},
        ):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_metrics_can_be_public(engine):
    async with http_client(make_app(engine, api_keys=KEYS, metrics_public=True)) as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/load")).status_code == 401


async def test_keys_never_share_blocks(engine):
    app = make_app(engine, api_keys=("a", "b"))
    async with http_client(app) as http:
        for key in ("a", "b", "a"):
            for extra in ({}, {"cache_salt": "s"}):
                body = {"prompt": "x"} | extra
                await http.post(TEXT, json=body, headers={"x-api-key": key})
    salts = [request.cache_salt for request in engine.requests]
    assert len(set(salts)) == 4
    assert salts[0] == salts[4]
    assert all(salts)


async def test_without_keys_blocks_are_shared_unless_salted(http, engine):
    for extra in ({}, {}, {"cache_salt": "s"}):
        await http.post(TEXT, json={"prompt": "x"} | extra)
    first, second, salted = [request.cache_salt for request in engine.requests]
    assert first == second == ""
    assert salted


async def test_keys_stay_out_of_the_settings_text():
    app = make_app(FakeEngine(), api_keys=("topsecret",))
    assert "topsecret" not in repr(app.state.context.settings)


async def test_body_over_the_bound_is_413(engine):
    app = make_app(engine, limits=Limits(body_bytes=1000))
    async with http_client(app) as http:
        declared = await http.post(TEXT, json={"prompt": "x" * 1000})

        async def chunks():
            for _ in range(20):
                yield b" " * 100

        headers = {"content-type": "application/json"}
        chunked = await http.post(TEXT, content=chunks(), headers=headers)
    for response in (declared, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_body_of_another_type_is_415(http, kind):
    response = await http.post(TEXT, content=b'{"prompt": "a"}', headers={"content-type": kind})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


async def test_a_packed_body_is_415_rather_than_bad_json(http):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await http.post(TEXT, content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert response.status_code == 415
    assert "Content-Encoding: gzip" in response.json()["error"]["message"]
    headers["content-encoding"] = "identity"
    response = await http.post(TEXT, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


async def test_json_with_a_charset_is_taken(http):
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await http.post(TEXT, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


async def test_headers_over_the_bound_are_431(http):
    many = {f"x-{i}": "1" for i in range(101)}
    big = {"x-big": "1" * 70_000}
    for headers in (many, big):
        response = await http.get("/health", headers=headers)
        assert response.status_code == 431
        assert response.json()["error"]["code"] == "headers_too_large"


async def test_a_body_that_never_ends_times_out(engine):
    app = make_app(engine, limits=Limits(body_timeout_s=0.01))
    async with Connection(app, TEXT, b"") as connection:
        pass
    connection = Connection(app, TEXT, b"")
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    await asyncio.wait_for(app(connection._scope, receive, send), 5)
    assert sent[0]["status"] == 408


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


async def test_overload_is_refused_before_any_work(engine, monkeypatch):
    engine.config = make_config(max_num_seqs=1, max_num_queued=1)
    engine.gate = asyncio.Event()
    app = make_app(engine)
    body = {"prompt": "a", "stream": True}
    async with Connection(app, TEXT, body) as one, Connection(app, TEXT, body) as two:
        await one.next_message()
        await two.next_message()

        def no_work(*_args, **_kwargs):
            raise AssertionError("tokenized")

        monkeypatch.setattr(engine.tokenizer, "encode", no_work)
        async with http_client(app) as http:
            response = await http.post(TEXT, content=unread())
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "overloaded"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            metrics = (await http.get("/metrics")).text
            load = (await http.get("/load")).json()
        assert 'vllm:admission_rejections_total{reason="max_num_queued_reqs"} 1.0' in metrics
        assert 'handler="/v1/completions",method="POST",status="503"} 1.0' in metrics
        assert (load["server_load"], load["capacity"]) == (2, 2)
        monkeypatch.undo()
        engine.gate.set()
        await one.ended()
        await two.ended()
    async with http_client(app) as http:
        assert (await http.post(TEXT, json={"prompt": "a"})).status_code == 200


async def test_more_prompts_than_the_queue_holds_can_never_be_taken(engine):
    engine.config = make_config(max_num_seqs=1, max_num_queued=1)
    async with http_client(make_app(engine)) as http:
        response = await http.post(TEXT, json={"prompt": ["a", "b", "c"]})
        assert response.status_code == 400
        assert (await http.post(TEXT, json={"prompt": ["a", "b"]})).status_code == 200


def test_retry_after_follows_the_drain_rate_and_forgets_pauses():
    now = [0.0]
    rate = DrainRate(lambda: now[0])
    assert rate.seconds_for(10) == 1.0
    rate.started()
    for _ in range(50):
        now[0] += 2.0
        rate.completed()
    assert rate.seconds_for(10) == pytest.approx(20)
    assert rate.seconds_for(1000) == 60
    now[0] += 10_000
    rate.started()
    now[0] += 2.0
    rate.completed()
    assert rate.seconds_for(10) == pytest.approx(20)


async def test_health_and_readiness_say_why(app, engine):
    async with http_client(app) as http:
        for path in ("/health", "/ready"):
            assert (await http.get(path)).json() == {"status": "ok"}
            assert (await http.head(path)).status_code == 200
        engine.healthy = engine.ready = False
        engine.unhealthy_reason = "no step for 70 s"
        for path in ("/health", "/ready"):
            response = await http.get(path)
            assert response.status_code == 503
            assert "no step for 70 s" in response.json()["error"]["message"]
        refused = await http.post(TEXT, json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        engine.config = None
        assert (await http.get("/v1/models")).status_code == 503
        assert (await http.get("/metrics")).status_code == 200


async def test_a_drain_turns_new_requests_away(app, engine):
    app.state.context.admission.draining = True
    async with http_client(app) as http:
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 200
        response = await http.post(TEXT, json={"prompt": "a"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "30"


async def test_metrics_have_vllms_names_and_right_counts(app, engine):
    engine.stats = Stats(
        num_running=3, num_waiting=2, kv_usage=0.5, prefix_queries=100, prefix_hits=40
    )
    async with http_client(app) as http:
        await http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 4, "n": 2})
        await http.post(TEXT, json={"prompt": "a"})
        await http.post(TEXT, json={"promt": "a"})
        text = (await http.get("/metrics")).text
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            samples[sample.name, *labels.values()] = sample.value
            if "model_name" in sample.labels:
                assert sample.labels["model_name"] == "fake-model"
    assert samples["vllm:num_requests_running",] == 3
    assert samples["vllm:num_requests_waiting",] == 2
    assert samples["vllm:num_requests_waiting_by_reason", "capacity"] == 2
    assert samples["vllm:kv_cache_usage_perc",] == 0.5
    assert samples["vllm:prefix_cache_queries_total",] == 100
    assert samples["vllm:prefix_cache_hits_total",] == 40
    assert samples["vllm:request_success_total", "length"] == 3
    assert samples["vllm:time_to_first_token_seconds_count",] == 3
    assert samples["vllm:inter_token_latency_seconds_count",] == 3 + 3 + 15
    assert samples["vllm:request_generation_tokens_sum",] == 4 + 4 + 16
    assert samples["vllm:e2e_request_latency_seconds_count",] == 3
    assert samples["http_requests_total", CHAT, "POST", "200"] == 1
    assert samples["http_requests_total", TEXT, "POST", "400"] == 1
    assert any(name == "vllm:cache_config_info" for name, *_ in samples)
    assert any(name == "plait:build_info" for name, *_ in samples)


async def test_aborted_sequences_are_counted(app, engine):
    engine.gate = asyncio.Event()
    async with Connection(app, CHAT, {"messages": MESSAGES, "stream": True, "n": 2}) as connection:
        await connection.next_message()
        connection.hang_up()
        await connection.ended()
    text = app.state.context.metrics.render(Access()).decode()
    assert 'finished_reason="abort",model_name="fake-model"} 2.0' in text
    assert 'status="499"' in text


def test_lag_gauge_keeps_the_worst_of_the_newest(app):
    gauge = app.state.context.metrics.loop_lag
    meter = LagMeter(gauge, num_kept=2)
    for lag, worst in ((0.1, 0.1), (-0.5, 0.1), (0.05, 0.05)):
        meter.record(lag)
        assert gauge.collect()[0].samples[0].value == worst


async def test_one_log_line_a_request_and_none_for_probes(http, caplog):
    caplog.set_level(logging.INFO, logger="plait.server.requests")
    body = {"prompt": "private words", "max_tokens": 3}
    await http.post(TEXT, json=body, headers={"x-request-id": "rid-1"})
    for path in ("/health", "/ready", "/metrics"):
        await http.get(path)
    (record,) = [r for r in caplog.records if r.name == "plait.server.requests"]
    line = record.getMessage()
    assert line.startswith("rid-1 POST /v1/completions 200 prompt=13 output=3 ")
    assert "private" not in caplog.text


async def test_browsers_of_listed_origins_may_call(engine):
    app = make_app(engine, api_keys=KEYS, allowed_origins=("https://chat.example",))
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    async with http_client(app) as http:
        good = await http.options(CHAT, headers={"origin": "https://chat.example"} | ask)
        bad = await http.options(CHAT, headers={"origin": "https://evil.example"} | ask)
    assert good.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-origin" not in bad.headers


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot open /srv/models/a.bin: gone", "cannot open …: gone"),
        ("C:\\Users\\me\\x.txt is bad", "… is bad"),
        ("<object at 0x7f3a2b1c0d10>", "<object at 0x…>"),
        ("no such route /v1/chat/foo", "no such route /v1/chat/foo"),
        ("input/output and/or 3/4", "input/output and/or 3/4"),
        ("bad\nTraceback (most recent call last):\n  File", "bad\n…"),
    ],
)
def test_sanitiser(message, shown):
    assert sanitise(message) == shown


async def test_a_prefix_of_the_proxy_is_taken_off(engine):
    app = make_app(engine, root_path="/llm", api_keys=KEYS)
    connection = Connection(app, "/llm/health", b"")
    connection._scope |= {"root_path": "/llm", "method": "GET", "headers": []}
    async with connection:
        assert (await connection.next_message())["status"] == 200
    connection = Connection(app, "/llm/v1/models", b"")
    connection._scope |= {"root_path": "/llm", "method": "GET", "headers": []}
    async with connection:
        assert (await connection.next_message())["status"] == 401


async def test_streams_carry_the_request_id(http):
    body = {"messages": MESSAGES, "stream": True}
    response = await http.post(CHAT, json=body, headers={"x-request-id": "s-1"})
    assert response.headers["x-request-id"] == "s-1"
    assert sse_events(response.content)[0]["id"] == "chatcmpl-s-1"
