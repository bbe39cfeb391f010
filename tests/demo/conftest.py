"""The embedded model with its tower is put together once for all tests that read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.platform.demo.assemble import assemble


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assemble(tmp_path_factory.mktemp("assembled"))
