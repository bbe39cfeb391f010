"""Fixtures of the HTTP tests: one fake engine, one application over it."""

import pytest
from support.fake_engine import FakeEngine
from support.http_app import http_client, make_app


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def app(engine):
    return make_app(engine)


@pytest.fixture
async def http(app, anyio_backend):
    async with http_client(app) as client:
        yield client
