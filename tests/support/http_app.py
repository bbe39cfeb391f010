"""An application over a `FakeEngine`, and ways to speak to it without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
from fastapi import FastAPI
from support.fake_engine import FakeEngine

from plait.platform.intake import Intake
from plait.platform.server.app import create_app
from plait.platform.server.settings import ServerSettings

BASE_URL = "http://plait.test"
MESSAGES = [{"role": "user", "content": "Hello"}]


def make_app(engine: FakeEngine, **settings: Any) -> FastAPI:
    return create_app(
        client=engine,
        tokenizer=engine.tokenizer,
        intake=Intake(engine.config, engine.tokenizer),
        settings=ServerSettings(**settings),
    )


def http_client(app: FastAPI, **options: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url=BASE_URL, **options)


@asynccontextmanager
async def openai_client(app: FastAPI, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    options = {"api_key": "none", "max_retries": 0, **options}
    async with (
        http_client(app) as http,
        openai.AsyncOpenAI(base_url=BASE_URL + "/v1", http_client=http, **options) as client,
    ):
        yield client


def sse_events(content: bytes) -> list[Any]:
    """The JSON of each event; checks the framing of every byte. "[DONE]" stays a string."""
    blocks = content.split(b"\n\n")
    assert blocks.pop() == b""
    events = []
    for block in blocks:
        if block.startswith(b":"):
            continue
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        data = block.removeprefix(b"data: ")
        events.append(data.decode() if data == b"[DONE]" else json.loads(data))
    return events


class Connection:
    """One request at the ASGI border: sees each message as it is sent, and can hang up."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any] | bytes) -> None:
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
        }
        self._app = app
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Connection:
        self._inbox.put_nowait({"type": "http.request", "body": self._body, "more_body": False})
        self.task = asyncio.create_task(self._app(self._scope, self._inbox.get, self.sent.put))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def next_message(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.sent.get(), 5)

    async def ended(self) -> None:
        assert self.task is not None
        await asyncio.wait_for(self.task, 5)
