"""Fixtures of the HTTP tests: one fake engine, one application over it."""

import pytest
from support.fake_engine import FakeEngine
from support.http_adapters import write_adapter
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


@pytest.fixture
def folder(tmp_path):
    """Adapters that an admin loads; what stands above it is loaded by requests too."""
    files = tmp_path / "adapters" / "files"
    for number, name in enumerate(("sql", "tone", "third"), 1):
        write_adapter(files / name, number)
    write_adapter(files.parent / "wild", 4)
    return files


@pytest.fixture
async def server(engine, folder, anyio_backend):
    app = make_app(engine, admin_key="boss", adapter_dir=str(folder.parent))
    async with http_client(app) as http:
        yield http
    await app.state.context.adapters.close()
