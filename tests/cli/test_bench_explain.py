"""Where a batch's time goes, how much of the memory's rate is reached, how long a start takes."""

import io
import json
import re

import pytest
import torch
from rich.console import Console
from support.tiny_models import make_checkpoint
from typer.testing import CliRunner

from plait.platform.bench import explain as explaining
from plait.platform.bench import startup
from plait.platform.bench.bandwidth import measure
from plait.platform.bench.explain import ENGINE, Stage, explain
from plait.platform.bench.random_model import BITS, LlamaShape, shape_for, write
from plait.platform.bench.throughput import Plan
from plait.platform.cli.bench import _as_arguments
from plait.platform.cli.engine_flags import MODEL
from plait.platform.cli.main import app
from plait.platform.cli.sources import Resolved
from plait.platform.errors import EngineDied

PROBE = {
    "num_threads": 1,
    "read_gb_per_s": {"best": 20.0, "median": 10.0},
    "gop_per_s": {"int8": {"best": 100.0, "median": 90.0}},
}


class Fake:
    """Two steps of prompts, 3 s each, then a second a step; "proj" takes half of that."""

    def __init__(self, clock):
        self._clock = clock
        self._steps = 0

    def phases(self):
        seconds = self._clock[0] / 2
        return {"proj": (seconds, 10**9 * self._steps, 2 * 10**9 * self._steps)}

    def steps(self, prompts, output_tokens):
        for number in range(output_tokens + 1):
            self._clock[0] += 3.0 if number < 2 else 1.0
            self._steps += 1
            if number == 0:
                yield [(0, [5]), (1, [])]
            else:
                yield [(index, [5]) for index in range(len(prompts))]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(explaining.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(explaining.time, "process_time", lambda: now[0] / 2)
    return now


def test_prefill_ends_with_the_last_prompt_and_parts_add_up(clock):
    stages = explain(Fake(clock), [[1, 2], [3]], 4)
    prefill, decode = stages["prefill"], stages["decode"]
    assert (prefill.seconds, prefill.num_steps, prefill.num_tokens) == (6.0, 2, 3)
    assert (decode.seconds, decode.num_steps, decode.num_tokens) == (3.0, 3, 6)
    assert prefill.phases == {"proj": (3.0, 2 * 10**9, 4 * 10**9), ENGINE: (3.0, 0, 0)}
    assert decode.phases == {"proj": (1.5, 3 * 10**9, 6 * 10**9), ENGINE: (1.5, 0, 0)}
    assert decode.as_dict()["gb_per_s"] == pytest.approx(1.0)
    assert decode.as_dict()["tokens_per_s"] == pytest.approx(2.0)


def test_the_table_shows_rates_as_shares_of_the_probe():
    stage = Stage(
        seconds=2.0,
        processor_s=2.0,
        num_steps=4,
        num_tokens=8,
        phases={"proj": (1.0, 5 * 10**9, 40 * 10**9), ENGINE: (1.0, 0, 0)},
    )
    page = io.StringIO()
    Console(width=120, file=page).print(explaining.table(3, {"decode": stage}, PROBE))
    text = page.getvalue()
    assert re.search(r"proj\s.*250\.000.*50%.*5\.0.*25%.*40", text)
    assert re.search(r"decode.*4 tok/s.*500\.000.*100%.*2\.5.*12%", text)
    assert "20.0 GB/s read" in text


class FakeEngine:
    weight_bytes = 5 * 10**9

    def __init__(self, clock):
        self.runner = Fake(clock)
        self.probes = 0

    def prompts(self, file):
        return lambda shape, seed: [[1] * shape.input_tokens]

    def probe(self):
        self.probes += 1
        read = PROBE["read_gb_per_s"]
        faster = {name: rate * self.probes / 2 for name, rate in read.items()}
        return PROBE | {"read_gb_per_s": faster}


def test_bandwidth_is_weights_by_steps_beside_the_probes_about_the_same_round(clock, monkeypatch):
    def steps(self, prompts, output_tokens):
        for _ in range(output_tokens):
            self._clock[0] += 1.0
            self._steps += 1
            yield [(0, [5])]

    monkeypatch.setattr(Fake, "steps", steps)
    engine = FakeEngine(clock)
    plan = Plan(batch_sizes=(1,), input_tokens=3, output_tokens=5, repeats=2)
    result, tables = measure(engine, plan, lambda _: None)
    assert result["gb_per_s"] == pytest.approx(5.0)
    # Three probes, of a half, once and one and a half times 10 and 20: means of 7.5 and 12.5.
    assert [one["share"] for one in result["rounds"]] == pytest.approx([5 / 7.5, 5 / 12.5])
    assert result["share"] == pytest.approx((5 / 7.5 + 5 / 12.5) / 2)
    assert result["share_of_best"] == pytest.approx((5 / 15 + 5 / 25) / 2)
    assert result["share_of_processor_time"] == pytest.approx((10 / 15 + 10 / 25) / 2)
    assert result["tokens_per_s"] == pytest.approx(1.0)
    assert engine.probes == 3
    assert tables[0].row_count == 1


@pytest.mark.parametrize("bits", sorted(set(BITS.values())))
def test_a_shape_is_the_smallest_that_is_large_enough(bits):
    for num_bytes in (1 << 20, 100_000_000, 300_000_000):
        shape = shape_for(num_bytes, bits, vocab_size=5000)
        assert shape.num_weights * bits / 8 >= num_bytes
        assert shape.num_layers == 1 or (
            (shape.num_weights - shape.layer_weights) * bits / 8 < num_bytes
        )


def test_a_random_model_is_one_that_transformers_reads(tmp_path):
    from transformers import AutoModelForCausalLM

    shape = LlamaShape(
        vocab_size=50, num_layers=2, hidden=32, intermediate=48, num_heads=4, num_kv_heads=2
    )
    write(shape, "{}", tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert matrices == shape.num_weights
    with torch.inference_mode():
        assert bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())


def test_flags_are_handed_on_as_they_were_given():
    values = {"model": "m.gguf", "threads": 2, "offline": True, "pin_threads": False}
    assert _as_arguments(Resolved(MODEL, values, {})) == [
        *("--model", "m.gguf", "--threads", "2", "--no-pin-threads", "--offline")
    ]
    assert _as_arguments(Resolved(MODEL, {}, {})) == []


def test_a_start_is_timed_to_its_first_text(monkeypatch):
    monkeypatch.setattr(startup, "_MAIN", "print('Once')")
    said: list[str] = []
    result = startup.measure([], 2, said.append)
    assert len(result["measured_s"]) == 2
    assert 0 < result["median_s"] < 60
    assert said[0].startswith("with whatever is cached")
    monkeypatch.setattr(startup, "_MAIN", "import sys; sys.exit('no such model')")
    with pytest.raises(EngineDied, match="no such model"):
        startup.measure([], 1, said.append)


def test_throughput_explains_itself(tmp_path):
    checkpoint = make_checkpoint("llama", tmp_path / "tiny-llama")
    shape = ["--batch-size", "1,2", "--input-len", "5", "--output-len", "4", "--repeats", "1"]
    small = ["--threads", "1", "--no-progress", "--kv-cache-memory", "4MiB", "--json", "-"]
    result = CliRunner().invoke(
        app, ["bench", "throughput", str(checkpoint), *shape, *small, "--explain"]
    )
    assert result.exit_code == 0, result.output
    explained = json.loads(result.stdout)["explained"]
    assert [one["batch_size"] for one in explained] == [1, 2]
    for one in explained:
        for stage in ("prefill", "decode"):
            assert {"forward", "head", "engine"} <= set(one[stage]["phases"])
            spent = sum(part["seconds"] for part in one[stage]["phases"].values())
            assert spent == pytest.approx(one[stage]["seconds"], rel=0.05)
        assert one["prefill"]["tokens"] == 5 * one["batch_size"]
    assert "ms a step" in result.stderr
