"""Parts of the steps in /metrics, by the names that the guide has."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from plait.platform.messages import Stats
from plait.platform.server.stats import StatsCollector

GUIDE = Path(__file__).parents[2] / "docs/performance.md"


def exported(stats: Stats, facts: dict | None = None) -> dict[str, float]:
    registry = CollectorRegistry()
    client = SimpleNamespace(stats=stats, config=None, facts=facts or {})
    registry.register(StatsCollector(client, lambda: "m"))  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if not line.startswith("#")
    }


def test_every_documented_metric_of_steps_is_exported():
    phases = {"down_proj": (2.0, 8 * 10**9, 16 * 10**9), "forward": (1.0, 0, 0)}
    found = exported(
        Stats(num_steps=3, step_seconds=4.0, phases=phases, steps_by_strands=(3,)),
        {"probe": {"read": 20.0, "int8": 150.0}},
    )
    labels = 'engine="0",model_name="m",phase="down_proj"'
    assert found[f"plait:step_phase_seconds_total{{{labels}}}"] == 2.0
    assert found[f"plait:step_phase_bytes_total{{{labels}}}"] == 8e9
    assert found[f"plait:step_phase_operations_total{{{labels}}}"] == 16e9
    assert found[f"plait:step_phase_gb_per_s{{{labels}}}"] == pytest.approx(4.0)
    assert found[f"plait:step_phase_gop_per_s{{{labels}}}"] == pytest.approx(8.0)
    assert found['plait:probe_read_gb_per_s{engine="0",model_name="m"}'] == 20.0
    assert found['plait:probe_gop_per_s{engine="0",model_name="m",type="int8"}'] == 150.0
    assert not any("forward" in name and "bytes" in name for name in found)
    names = {name.partition("{")[0] for name in found}
    documented = set(re.findall(r"`(plait:\w+)`", GUIDE.read_text("utf-8")))
    assert len(documented) == 12
    assert documented - names == {"plait:model_info"}  # which is said by a server, not by steps


def test_rows_are_told_by_kind_and_steps_by_which_strands_met():
    steps = [0] * 16
    steps[0b0000], steps[0b0101], steps[0b1111] = 7, 2, 3
    found = exported(
        Stats(prefill_rows=5, draft_rows=2, mask_rows=4, steps_by_strands=tuple(steps))
    )
    rows = 'plait:step_rows_total{engine="0",kind="%s",model_name="m"}'
    assert [found[rows % k] for k in ("prefill", "draft", "masked", "image")] == [5, 2, 4, 0]
    by_strands = 'plait:steps_by_strands_total{engine="0",model_name="m",strands="%s"}'
    assert found[by_strands % "none"] == 7
    assert found[by_strands % "adapters+drafts"] == 2
    assert found[by_strands % "adapters+images+drafts+grammars"] == 3
    assert sum(value for name, value in found.items() if "steps_by_strands" in name) == 12


def test_an_engine_that_has_computed_nothing_has_no_parts():
    assert not any("phase" in name for name in exported(Stats()))
