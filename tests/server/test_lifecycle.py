"""The server's life over a real socket: start, drain on a signal, and the way out."""

import asyncio
import contextlib
import os
import signal
from contextlib import asynccontextmanager

import httpx
import pytest
from support.fake_engine import FakeEngine
from support.http_app import MESSAGES, make_app, sse_events

from plait.platform.core import Event, FinishReason
from plait.platform.server.app import serve
from plait.platform.server.settings import Limits, ServerSettings

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
STREAM = {"messages": MESSAGES, "stream": True}


class DrainingEngine(FakeEngine):
    """Like the real one: the drain waits for what runs, then ends it with an abort."""

    async def drain(self, timeout_s):
        await super().drain(timeout_s)
        self.draining.set()
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_open:
                    await asyncio.sleep(0.005)
        except TimeoutError:
            event = Event(request_id="", index=0, finish_reason=FinishReason.ABORT)
            self.fail_after = (1, event)
            self.gate.set()
            while self.num_open:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(tmp_path, **options):
    engine = DrainingEngine()
    engine.gate, engine.draining = asyncio.Event(), asyncio.Event()
    settings = {"uds": str(tmp_path / "s"), **options}
    app = make_app(engine, **settings)
    task = asyncio.create_task(serve(app, ServerSettings(**settings)))
    while not (tmp_path / "s").exists():
        await asyncio.sleep(0.005)
    transport = httpx.AsyncHTTPTransport(uds=settings["uds"], retries=3)
    async with httpx.AsyncClient(transport=transport, base_url="http://plait.test") as http:
        yield engine, http, task
    if not task.done():
        os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(task, 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_running_requests_end_and_new_ones_are_turned_away(tmp_path, number):
    async with serving(tmp_path) as (engine, http, task):
        async with http.stream("POST", CHAT, json=STREAM) as response:
            blocks = response.aiter_raw()
            content = await anext(blocks)
            os.kill(os.getpid(), number)
            await engine.draining.wait()
            assert (await http.get("/ready")).status_code == 503
            refused = await http.post(CHAT, json=STREAM)
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            engine.gate.set()
            async for block in blocks:
                content += block
        assert sse_events(content)[-1] == "[DONE]"
        await asyncio.wait_for(task, 10)
    assert engine.closed
    assert engine.drained == [30.0]
    assert engine.aborted == []


async def test_a_hangup_that_is_ignored_stays_so(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with serving(tmp_path) as (engine, http, _task):
            os.kill(os.getpid(), signal.SIGHUP)
            assert (await http.get("/ready")).status_code == 200
            assert not engine.draining.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_what_outlasts_the_timeout_ends_with_an_error(tmp_path):
    async with serving(tmp_path, shutdown_timeout_s=0.05) as (engine, http, task):
        async with http.stream("POST", CHAT, json=STREAM) as response:
            blocks = response.aiter_raw()
            content = await anext(blocks)
            os.kill(os.getpid(), signal.SIGTERM)
            async for block in blocks:
                content += block
        assert sse_events(content)[-1]["error"]["code"] == "aborted"
        await asyncio.wait_for(task, 10)
    assert engine.closed


async def test_second_signal_ends_at_once(tmp_path):
    async with serving(tmp_path) as (engine, http, task):
        async with http.stream("POST", CHAT, json=STREAM) as response:
            blocks = response.aiter_raw()
            await anext(blocks)
            os.kill(os.getpid(), signal.SIGTERM)
            await engine.draining.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(httpx.HTTPError):
                async for _ in blocks:
                    pass
        await asyncio.wait_for(task, 10)
    assert engine.closed
    assert engine.num_open == 0


async def test_client_that_closes_its_socket_aborts(tmp_path):
    async with serving(tmp_path) as (engine, http, _task):
        async with http.stream("POST", CHAT, json=STREAM) as response:
            await anext(response.aiter_raw())
            assert engine.num_open == 1
        waiting = asyncio.create_task(http.post(CHAT, json={"messages": MESSAGES}))
        while len(engine.requests) < 2 or not engine.num_open:
            await asyncio.sleep(0.005)
        waiting.cancel()
        while engine.num_open:
            await asyncio.sleep(0.005)
        assert len(engine.aborted) == 2


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("start", "more", "status"),
    [
        (b"GET /health HTTP/1.1\r\nx-big: ", b"1", 431),
        (b"GET /health HTTP/1.1\r\n", b"a: b\r\n", 431),
        (b"GET /", b"a", 431),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"a: b\r\n", 413),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1;ext=aaaaaaaa\r\n \r\n", 413),
        (b"not http at all\r\n", b"", 400),
    ],
)
async def test_endless_messages_are_cut_off(tmp_path, start, more, status):
    limits = Limits(body_bytes=50_000)
    async with serving(tmp_path, limits=limits):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000 if more else 0):
                writer.write(more * 1000)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert b'{"error":{' in answer
        writer.close()


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEA\r\n"
ASKED = b'{"prompt": "a"}'


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + UPGRADE + b"content-length: %d\r\n\r\n%s" % (len(ASKED), ASKED),
        HEAD + UPGRADE + b"transfer-encoding: chunked\r\n\r\n"
        b"%x\r\n%s\r\n0\r\na: b\r\n\r\n" % (len(ASKED), ASKED),
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + UPGRADE.replace(b"h2c", b"websocket") + b"\r\n",
    ],
    ids=["length", "chunked", "no body", "websocket"],
)
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_an_offered_upgrade_changes_nothing(tmp_path, request_bytes, size):
    """Java's HTTP client offers h2c with each request."""
    async with serving(tmp_path) as (engine, _http, _task):
        engine.gate.set()
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        twice = request_bytes * 2
        for start in range(0, len(twice), size):
            writer.write(twice[start : start + size])
            await asyncio.sleep(0)
        for _ in range(2):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200 ")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert (await reader.readexactly(length)).startswith(b"{")
        writer.close()
        assert len(engine.requests) == (2 if ASKED in request_bytes else 0)


async def test_a_head_that_never_ends_is_given_up(tmp_path):
    async with serving(tmp_path, limits=Limits(header_timeout_s=0.05)):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(b"GET /health HTTP/1.1\r\n")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_an_answer_that_nobody_reads_is_given_up(tmp_path):
    async with serving(tmp_path, limits=Limits(unread_timeout_s=0.1)) as (engine, _http, _task):
        engine.gate.set()
        engine.reply = lambda _request, _index: "x" * 4000
        body = b'{"prompt": "a", "max_tokens": 4000, "stream": true}'
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1000)
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(10):
            while not engine.aborted:  # the reader's buffer is soon full, and then nothing is read
                await asyncio.sleep(0.005)
        assert engine.num_open == 0
        writer.close()


async def test_an_answer_that_is_read_slowly_is_sent_to_its_end(tmp_path):
    async with serving(tmp_path, limits=Limits(unread_timeout_s=0.1)) as (engine, _http, _task):
        engine.gate.set()
        engine.reply = lambda _request, _index: "x" * 4000
        engine.split = lambda num_tokens: [num_tokens]
        body = b'{"prompt": "a", "max_tokens": 4000, "logprobs": 3}'
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"), limit=1000)
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        num_read = 0
        while num_read < length:
            num_read += len(await asyncio.wait_for(reader.read(20_000), 5))
            await asyncio.sleep(0.03)
        writer.close()


async def test_a_connection_serves_many_requests(tmp_path):
    async with serving(tmp_path, limits=Limits(header_bytes=500)) as (engine, http, _task):
        engine.gate.set()
        for _ in range(10):
            assert (await http.post(CHAT, json={"messages": MESSAGES})).status_code == 200
