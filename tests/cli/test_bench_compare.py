"""Engines compared: who waits for whom, what counts, what a reader sees. No engine is needed."""

import itertools
import json
import math
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from plait.platform.bench import comparing, worker_process
from plait.platform.bench.compare_report import best, console_table, page, plot
from plait.platform.bench.comparison import Contender, measure, ratio, read_steps, results
from plait.platform.bench.entries import ENTRIES, PEERS, Entry, chosen, why_missing
from plait.platform.bench.install import peer_named
from plait.platform.bench.throughput import Plan
from plait.platform.bench.weights import make
from plait.platform.bench.worker_process import WorkerFailed, WorkerProcess
from plait.platform.bench.workload import Shape
from plait.platform.cli.bench_compare import _without_places
from plait.platform.cli.main import app
from plait.platform.errors import ConfigError

FAKE = '''
"""Answers 7, then 8, and so on; prints where it must not; fails and dies when asked."""
import os
class Engine:
    def __init__(self, weights, **options):
        print("noise")
        if options.get("fail"):
            raise ValueError("no such weights")
        self.versions = {"fake": weights}
    def run(self, prompts, output_tokens, step):
        if output_tokens == 99:
            print("last words", flush=True)
            os._exit(3)
        for number in range(output_tokens):
            step([(i, [7 + number + len(p)]) for i, p in enumerate(prompts)])
'''


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Starts workers of the fake engine, as peers' are started."""
    script = Path(shutil.copy(worker_process._SCRIPT, tmp_path))
    (tmp_path / "fake_peer.py").write_text(FAKE)
    monkeypatch.setattr(worker_process, "_SCRIPT", script)
    with WorkerProcess(Path(sys.executable), "fake", (), tmp_path / "log") as process:
        yield process


def test_a_worker_answers_whatever_its_engine_prints(worker):
    assert worker.ask("load", weights="w", options={})["versions"] == {"fake": "w"}
    steps = worker.ask("run", prompts=[[1], [1, 2]], output_tokens=3)["steps"]
    assert [tokens for _, _, tokens in steps] == [[[0, [8 + i]], [1, [9 + i]]] for i in range(3)]
    assert all(0 <= a[0] <= b[0] and a[1] <= b[1] for a, b in itertools.pairwise(steps))


def test_a_worker_says_what_its_engine_raised_and_goes_on(worker):
    with pytest.raises(WorkerFailed, match="ValueError: no such weights"):
        worker.ask("load", weights="w", options={"fail": True})
    assert worker.ask("load", weights="w", options={})["versions"]
    with pytest.raises(WorkerFailed, match="no such request"):
        worker.ask("dance")


def test_a_worker_that_dies_is_a_failure_with_its_last_words(worker):
    worker.ask("load", weights="w", options={})
    with pytest.raises(WorkerFailed, match=r"its process ended.*last words"):
        worker.ask("run", prompts=[[1]], output_tokens=99)
    with pytest.raises(WorkerFailed):
        worker.ask("run", prompts=[[1]], output_tokens=1)


def test_a_worker_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("import threading; threading.Event().wait()")
    monkeypatch.setattr(worker_process, "_SCRIPT", script)
    log = tmp_path / "log"
    process = WorkerProcess(Path(sys.executable), "fake", (), log, timeout_s=0.2)
    with process, pytest.raises(WorkerFailed, match="it printed nothing"):
        process.ask("load")


def test_no_peer_imports_ours():
    own = {"worker.py", "plait_peer.py", "probe_peer.py"}
    scripts = {p.name: p.read_text() for p in worker_process._SCRIPT.parent.glob("*.py")}
    assert own < scripts.keys()
    for name, text in scripts.items():
        if name not in own - {"worker.py"}:
            assert "plait." not in text, name


class FakeWorker:
    """Takes `seconds` for the prompts and for each token, on both clocks."""

    started_s = 0.0

    def __init__(self, name, seconds, log, *, fails_in=None):
        self._name, self._seconds, self._log, self._fails_in = name, seconds, log, fails_in
        self._num_runs = 0

    def ask(self, op, **request):
        self._num_runs += 1
        self._log.append((self._name, tuple(map(tuple, request["prompts"]))))
        if self._num_runs == self._fails_in:
            raise WorkerFailed("it fell")
        num = range(len(request["prompts"]))
        return {
            "steps": [
                (self._seconds * (i + 1), self._seconds * (i + 1) / 2, [(s, [5]) for s in num])
                for i in range(request["output_tokens"])
            ]
        }

    def close(self):
        pass


PROBE = {
    "num_threads": 1,
    "read_gb_per_s": {"best": 20.0, "median": 10.0},
    "gop_per_s": {"int8": {"best": 100.0, "median": 90.0}},
}


def rounds_of(seconds, *, fails_in=None, repeats=3):
    log: list = []
    contenders = [
        Contender(
            entry=Entry(engine=name, weights="q4_0"),
            worker=FakeWorker(name, one, log, fails_in=fails_in if name == "other" else None),
            facts={"first_token_s": 1.0, "versions": {name: "1"}},
        )
        for name, one in seconds.items()
    ]
    plan = Plan(batch_sizes=(1, 4), input_tokens=3, output_tokens=5, repeats=repeats)

    def prompts(shape: Shape, seed: int):
        return [[seed, i, 0] for i in range(shape.batch_size)]

    said: list[str] = []
    rounds = list(measure(plan, contenders, lambda _: PROBE, prompts, said.append))
    return rounds, contenders, log, said, plan


def test_all_engines_answer_the_same_prompts_and_take_turns_in_going_first():
    rounds, _, log, _, _ = rounds_of({"plait": 0.5, "other": 1.0, "third": 2.0})
    assert [(r["repeat"], r["batch_size"]) for r in rounds] == [
        (repeat, size) for repeat in range(3) for size in (1, 4)
    ]
    in_rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert all(len({asked for _, asked in one}) == 1 for one in in_rounds)
    assert [one[0][0] for one in in_rounds] == ["plait", "other", "third"] * 2
    assert all(r["probe"] == PROBE for r in rounds)


def test_rates_of_known_steps():
    rounds, *_ = rounds_of({"plait": 0.5, "other": 1.0})
    found = results(rounds)
    assert [one["batch_size"] for one in found] == [1, 4]
    ours = found[1]["engines"]["plait-q4_0"]
    assert ours["wall"]["decode_rate"] == pytest.approx(4 * 4 / 2.0)
    assert ours["processor"]["decode_rate"] == pytest.approx(4 * 4 / 1.0)
    assert ours["wall"]["prefill_rate"] == pytest.approx(4 * 3 / 0.5)
    assert ours["usual_first_tokens"] == 1.0
    assert ratio(rounds, "plait-q4_0", "other-q4_0", (4, "decode_rate", "wall")) == pytest.approx(
        2.0
    )
    assert math.isnan(ratio(rounds, "plait-q4_0", "none", (4, "decode_rate", "wall")))


def test_an_engine_that_fails_is_left_out_and_said_so():
    rounds, contenders, log, said, _ = rounds_of({"plait": 0.5, "other": 1.0}, fails_in=3)
    assert contenders[1].facts["failed"] == "it fell"
    assert sum("failed: it fell" in line for line in said) == 1
    assert [len(r["engines"]) for r in rounds] == [2, 2, 1, 1, 1, 1]
    assert [name for name, _ in log].count("other") == 3
    assert results(rounds)[0]["engines"]["other-q4_0"]["rounds"] == 1


def test_ctrl_c_keeps_the_rounds_that_are_whole():
    said: list[str] = []
    rounds = [{"repeat": 0}]
    with comparing._until_told_to_stop(rounds, said.append):
        raise KeyboardInterrupt
    assert said == ["told to stop: 1 rounds are reported"]
    with pytest.raises(KeyboardInterrupt), comparing._until_told_to_stop([], said.append):
        raise KeyboardInterrupt


def test_an_answer_of_another_length_is_no_measurement():
    steps = [(1.0, 1.0, [(0, [1])]), (2.0, 2.0, [(0, [2])])]
    assert read_steps(steps, [[0]], 2).first_tokens == (1,)
    with pytest.raises(RuntimeError, match=r"answers have \[2\] tokens, not 3"):
        read_steps(steps, [[0]], 3)


def report_of(seconds, clock="wall"):
    rounds, contenders, _, _, plan = rounds_of(seconds)
    return {
        "model": "Small <1B>",
        "clock": clock,
        "plan": {"input_tokens": plan.input_tokens, "output_tokens": 5, "repeats": 3},
        "machine": {"processor": "P & Q", "cpu_isa": "avx2", "num_cores": 2, "cores": [0]},
        "engines": {c.entry.name: c.facts for c in contenders} | {"vllm-bf16": {"skipped": "no"}},
        "rounds": rounds,
        "results": results(rounds),
    }


def test_a_page_shows_every_engine_and_how_it_was_measured():
    report = report_of({"plait": 0.5, "other": 1.0})
    text = page(report, "plait bench compare")
    assert "    plait bench compare\n" in text
    assert "| plait-q4_0 | 2 | 8 | 6 | 24 | 1.0 |" in text
    assert "| other-q4_0 | 1 | 4 | 3 | 12 | 1.0 |" in text
    assert "| decode, batch 4 | plait-q4_0 | other-q4_0 | 2.00 |" in text
    assert "| memory read, GB/s | 10.0 to 10.0 |" in text
    assert "| vllm-bf16 | not measured: no |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert console_table(report).row_count == 2
    assert best(report["results"][0], "decode_rate", clock="wall", own=False) == "other-q4_0"


def test_the_other_clock_has_a_page_too():
    text = page(report_of({"plait": 0.5, "other": 1.0}, "processor"), "c")
    assert "| plait-q4_0 | 4 | 16 | 12 | 48 | 1.0 |" in text
    assert "by processor time" in text


def test_a_comparison_with_nobody_has_no_ratios():
    assert "## Ratios" not in page(report_of({"plait": 0.5}), "c")


def test_the_plot_is_xml_and_its_bars_have_the_rates_lengths():
    tree = ET.fromstring(plot(report_of({"plait": 0.5, "other": 1.0})))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in tree.iter(f"{space}text")]
    assert texts.count("plait-q4_0") == 3
    assert "Small <1B> on P & Q" in texts
    bars = [float(r.get("width")) for r in list(tree.iter(f"{space}rect"))[1:]]
    assert bars[0] == pytest.approx(2 * bars[1], rel=0.01)


def test_a_page_tells_no_places():
    command = [
        "bench",
        "compare",
        "--json",
        "/a",
        "--pages=/b",
        "--clock",
        "wall",
        "--peers-dir",
        "c",
    ]
    assert _without_places(command) == ["bench", "compare", "--clock", "wall"]


def test_engines_are_chosen_by_name_or_engine():
    assert [e.name for e in chosen(["llama.cpp", "plait-int8"])] == [
        "llama.cpp-q4_1",
        "llama.cpp-q4_0",
        "plait-int8",
    ]
    assert [e.name for e in chosen(["vllm-bf16-eager", "vllm"])] == ["vllm-bf16-eager", "vllm-bf16"]
    assert all(e.by_default for e in chosen([]))
    with pytest.raises(ConfigError, match="--engine knows no gpt"):
        chosen(["gpt"])
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


def test_what_is_not_installed_says_how_to_install_it(tmp_path):
    (entry,) = chosen(["openvino-q4_0"])
    assert why_missing(entry, tmp_path) == ("not installed: `plait bench peers --install openvino`")
    strange = Entry(engine="plait", weights="bf16", options={"telepathy": True})
    assert why_missing(strange, tmp_path) == "this version has no telepathy"
    (ours,) = chosen(["plait-q4_1"])
    assert why_missing(ours, tmp_path) is None


def test_peers_are_listed_and_pinned(tmp_path):
    result = CliRunner().invoke(app, ["bench", "peers", "--peers-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for peer in PEERS:
        assert peer.name in result.stdout
        assert all("==" in package for package in peer.packages)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="--install knows no gpt"):
        peer_named("gpt")


def write_gguf(path: Path) -> Path:
    values = np.random.default_rng(3).normal(size=(6, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1])
    for name, kind in (
        ("token_embd.weight", gguf.GGMLQuantizationType.Q8_0),
        ("blk.0.attn_q.weight", gguf.GGMLQuantizationType.Q4_1),
    ):
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("blk.0.attn_norm.weight", values[0])
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    return path


def test_the_same_numbers_in_another_format(tmp_path):
    source = write_gguf(tmp_path / "tiny.Q4_1.gguf")
    assert make(source, "q4_1", tmp_path / "out") == source
    made = make(source, "q4_0", tmp_path / "out")
    assert made.name.endswith(".q4_0.gguf")
    stamp = made.stat().st_mtime_ns
    assert make(source, "q4_0", tmp_path / "out") == made
    assert made.stat().st_mtime_ns == stamp  # found, not made again
    before, after = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (source, made))
    assert before.keys() == after.keys()
    for name in ("token_embd.weight", "blk.0.attn_norm.weight"):
        assert after[name].tensor_type == before[name].tensor_type
        assert np.array_equal(after[name].data, before[name].data)
    old, new = (
        gguf.dequantize(t.data, t.tensor_type)
        for t in (before["blk.0.attn_q.weight"], after["blk.0.attn_q.weight"])
    )
    assert after["blk.0.attn_q.weight"].tensor_type is gguf.GGMLQuantizationType.Q4_0
    assert np.abs(old - new).max() < np.abs(old).max() / 7
    fields = gguf.GGUFReader(made).fields
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
    assert fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    with pytest.raises(ConfigError, match="is no GGUF file, from which q4_0 is made"):
        make(tmp_path / "none.gguf", "q4_0", tmp_path)


def test_a_directory_is_a_checkpoint_already(tmp_path):
    assert make(tmp_path, "bf16", tmp_path / "out") == tmp_path
    with pytest.raises(ConfigError, match="q4_0"):
        make(tmp_path, "q4_0", tmp_path / "out")


def test_a_whole_comparison_of_processes_writes_report_page_and_plot(worker, tmp_path, monkeypatch):
    """With the fake engine in our engine's and another's place."""
    del worker  # started only for the script beside which the fake lies
    source = write_gguf(tmp_path / "tiny.Q4_1.gguf")
    (tmp_path / "probe_peer.py").write_text(
        "class Engine:\n"
        "    versions = {}\n"
        "    def __init__(self, weights, **options): pass\n"
        f"    def probe(self, seconds): return {PROBE}\n"
    )
    for name in ("plait", "transformers"):
        shutil.copy(tmp_path / "fake_peer.py", tmp_path / f"{name}_peer.py")
    monkeypatch.setattr(comparing.weights, "make", lambda source, kind, folder: source)
    engines = [
        "--engine", "plait-q4_1", "--engine", "transformers", "--engine", "llama.cpp-q4_0"
    ]  # fmt: skip
    shape = ["--batch-size", "1,2", "--input-len", "3", "--output-len", "4", "--repeats", "2"]
    folders = ["--peers-dir", str(tmp_path), "--bench-dir", str(tmp_path)]
    results_to = ["--json", str(tmp_path / "r.json"), "--pages", str(tmp_path)]
    result = CliRunner().invoke(
        app, ["bench", "compare", str(source), *engines, *shape, *folders, *results_to]
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report["results"][1]["engines"]) == {"plait-q4_1", "transformers-bf16"}
    assert "not installed" in report["engines"]["llama.cpp-q4_0"]["skipped"]
    assert report["results"][0]["engines"]["plait-q4_1"]["rounds"] == 2
    assert "plait-q4_1" in (tmp_path / "comparison.md").read_text()
    ET.parse(tmp_path / "comparison.svg")
    assert "first token after" in result.stderr
