"""`plait demo`: its stops hold, it is plain where nobody looks, and its exit code tells."""

from __future__ import annotations

import contextlib

import pytest
from typer.testing import CliRunner

from plait.platform.cli import demo
from plait.platform.cli.main import app
from plait.platform.demo import tour

runner = CliRunner()


def test_the_tour_holds_and_is_plain_where_there_is_no_terminal() -> None:
    result = runner.invoke(app, ["demo", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "✗" not in result.output
    assert result.output.count("✓") == 4
    for fact in ("Could you please have a look?", "sql       SELECT AVG(speed)", "24 requests"):
        assert fact in result.output


def test_what_does_not_hold_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        def __init__(self, **_: object) -> None:
            self.config = type("C", (), {"model": type("M", (), {"name": "m"})})
            self.list_adapters = list

    def run(_: object, voice: tour.Voice) -> bool:
        voice.held("that it is so", true=False)
        return False

    monkeypatch.setattr("plait.platform.api.LLM", lambda **_: contextlib.nullcontext(Model()))
    monkeypatch.setattr(tour, "run", run)
    result = runner.invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "✗ that it is so" in result.output
    assert demo.FAILED == 1
