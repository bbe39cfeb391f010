"""The commands that compute, on a tiny random checkpoint."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from support.seeing import make_seeing_checkpoint
from support.tiny_models import make_checkpoint, rewrite_config
from support.tiny_vision import make_vision_checkpoint
from typer.testing import CliRunner

from plait import LLM
from plait.platform.cli.main import app
from plait.platform.errors import ModelUnsupported

runner = CliRunner()
PLAIT = (sys.executable, "-c", "from plait.platform.cli.main import app; app()")
SMALL = ("--threads", "1", "--no-progress", "--kv-cache-memory", "4MiB")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("models") / "tiny-llama")


def test_check_says_what_it_takes(checkpoint):
    result = runner.invoke(app, ["check", str(checkpoint), "--kv-cache-memory", "4MiB"])
    assert result.exit_code == 0, result.output
    assert "tiny-llama can be served" in result.stdout
    assert "LlamaForCausalLM" in result.stdout
    result = runner.invoke(app, ["check", str(checkpoint), "--json", "--kv-cache-memory", "4MiB"])
    report = json.loads(result.stdout)
    assert report["servable"] is True
    assert 0 < report["kv_bytes"] <= 4 << 20
    assert report["memory_bytes"] == report["weight_bytes"] + report["kv_bytes"]
    tokens, per_token = report["kv_tokens"], report["kv_bytes_per_token"]
    assert tokens * per_token <= 4 << 20 < (tokens + 32) * per_token


def test_check_says_why_not(checkpoint, tmp_path):
    result = runner.invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 1
    assert "holds no config.json" in result.stdout
    result = runner.invoke(app, ["check", str(checkpoint), "--json", "--kv-cache-memory", "1KiB"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["servable"] is False
    assert "KV" in report["reason"]


def check(directory, *flags):
    return runner.invoke(app, ["check", str(directory), "--kv-cache-memory", "4MiB", *flags])


def test_check_says_whether_images_are_taken_and_what_their_embeddings_may_take(tmp_path):
    make_seeing_checkpoint("qwen2_vl", tmp_path)
    result = check(tmp_path)
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("  images")]
    assert "taken, as qwen2_vl" in line
    assert "embeddings of images" in result.stdout
    report = json.loads(check(tmp_path, "--json", "--encoder-cache-memory", "3MiB").stdout)
    assert report["encoder_bytes"] == 3 << 20
    parts = ("weight_bytes", "kv_bytes", "encoder_bytes")
    assert report["memory_bytes"] == sum(report[part] for part in parts)
    (tmp_path / "preprocessor_config.json").unlink()
    result = check(tmp_path)
    assert result.exit_code == 1
    assert "has no image processor" in result.stdout
    result = check(tmp_path, "--encoder-cache-memory", "0")
    assert result.exit_code == 0
    assert "refused, as --encoder-cache-memory 0 asks" in result.stdout


def test_images_that_nothing_here_can_process_are_refused_before_weights(tmp_path, monkeypatch):
    make_vision_checkpoint("cohere2_vision", tmp_path)
    monkeypatch.setattr("plait.platform.offline.llm.start_engine", None)
    monkeypatch.setattr("plait.platform.server.process.ProcessClient.start", None)
    why = "images of cohere2_vision are not served.*torchvision.*--encoder-cache-memory 0"
    with pytest.raises(ModelUnsupported, match=why):
        LLM(str(tmp_path))
    result = check(tmp_path)
    assert result.exit_code == 1
    assert re.search(why, result.stdout)
    result = runner.invoke(app, ["serve", str(tmp_path), "--port", "0"])
    assert result.exit_code == 1
    assert re.search(why, " ".join(result.stderr.split()))


def test_check_refuses_an_architecture_by_name(tmp_path):
    directory = make_checkpoint("llama", tmp_path / "odd")
    rewrite_config(directory, model_type="mamba", architectures=["MambaForCausalLM"])
    result = runner.invoke(app, ["check", str(directory)])
    assert result.exit_code == 1
    assert "Mamba" in result.stdout


def test_complete_is_the_same_streamed_or_not(checkpoint):
    ask = ["complete", "hello", "-m", str(checkpoint), "--temperature", "0", "--max-tokens", "6"]
    whole = runner.invoke(app, [*ask, *SMALL, "--stats"])
    streamed = runner.invoke(app, [*ask, *SMALL, "--stream"])
    assert whole.exit_code == streamed.exit_code == 0, whole.output
    assert whole.stdout == streamed.stdout
    assert re.search(r"\[TTFT \d+ ms", whole.stderr)


def test_complete_names_the_numbers_of_a_prompt_too_long(checkpoint):
    ask = ["complete", "hello", "-m", str(checkpoint), "--max-tokens", "99999"]
    result = runner.invoke(app, [*ask, *SMALL])
    assert result.exit_code == 1
    assert "99999" in result.stderr
    assert "Traceback" not in result.stderr


def test_chat_answers_a_pipe(checkpoint):
    result = runner.invoke(
        app, ["chat", str(checkpoint), "--max-tokens", "4", *SMALL], input="hi\n/stats\n"
    )
    assert result.exit_code == 0, result.output
    assert "1 answers" in result.stderr


def test_ctrl_c_waits_for_the_end_of_a_step(checkpoint):
    from plait.platform.cli.local import LocalAnswerer
    from plait.platform.config import Options
    from plait.platform.core import SamplingParams

    options = Options(model=str(checkpoint), num_threads=1, progress=False, kv_cache_bytes=4 << 20)
    answerer = LocalAnswerer(options)
    engine = answerer._llm._engine
    handler, step = signal.getsignal(signal.SIGINT), engine.step

    def interrupted_step():
        signal.raise_signal(signal.SIGINT)
        return step()

    pieces = answerer.complete("hello", SamplingParams(max_tokens=20, ignore_eos=True))
    next(pieces)
    engine.step = interrupted_step
    next(pieces)  # the step that was interrupted is whole
    engine.step = step
    with pytest.raises(KeyboardInterrupt):
        next(pieces)
    assert signal.getsignal(signal.SIGINT) is handler
    assert engine.num_unfinished == 0
    engine.scheduler.check_integrity()
    assert len(list(answerer.complete("hello", SamplingParams(max_tokens=3, ignore_eos=True)))) == 3


def test_throughput_is_compared_with_adapters(checkpoint):
    shape = ["--batch-size", "1,3", "--input-len", "5", "--output-len", "4", "--repeats", "2"]
    result = runner.invoke(
        app,
        [
            "bench",
            "throughput",
            str(checkpoint),
            *shape,
            *SMALL,
            "--random-adapters",
            "2",
            "--json",
            "-",
        ],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [r["batch_size"] for r in report["results"]] == [1, 3]
    for entry in report["results"]:
        assert entry["ratios"]["2 adapters"]["decode_rate"] > 0
        assert len(entry["runners"]["plait"]["measured"]["decode_rate"]) == 2
    assert "× 2 adapters" in result.stderr


def test_latency_has_percentiles(checkpoint):
    shape = ["--input-len", "5", "--output-len", "4", "--repeats", "2"]
    result = runner.invoke(
        app, ["bench", "latency", str(checkpoint), *shape, *SMALL, "--json", "-"]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)["results"]
    assert figures["requests"] == 2
    assert 0 < figures["itl_ms"]["p50"] <= figures["itl_ms"]["p99"]


def test_images_are_measured_by_size(checkpoint, tmp_path):
    def bench(directory, *flags):
        ask = ["bench", "images", str(directory), "--repeats", "1", "--json", "-", *flags]
        return runner.invoke(app, ask)

    make_seeing_checkpoint("qwen2_vl", tmp_path)
    result = bench(tmp_path, "--image-size", "40x24", "--image-size", "64x64")
    assert result.exit_code == 0, result.output
    small, large = json.loads(result.stdout)["results"]
    assert (small["width"], small["height"], small["embeddings"]) == (40, 24, 15)
    assert min(large["prepare_ms"], large["encode_ms"]) > 0
    assert "embeddings" in result.stderr
    for refused, why in (
        (bench(tmp_path, "--image-size", "big"), "write 1184x848"),
        (bench(checkpoint), "takes no images"),
    ):
        assert refused.exit_code in (1, 2)
        assert why in " ".join(refused.stderr.split())


def test_serve_answers_under_load_and_ends_cleanly(checkpoint, tmp_path):
    config = tmp_path / "plait.yaml"
    config.write_text("port: 0\nthreads: 1\nprogress: false\nkv-cache-memory: 4MiB\n")
    server = subprocess.Popen(
        [
            *PLAIT,
            "serve",
            str(checkpoint),
            "--config",
            str(config),
            "--served-model-name",
            "tiny",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "120"},
    )
    try:
        assert server.stderr is not None
        said = ""
        while "URL" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        url = re.search(r"http://\S+", said)[0]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        ask = ["complete", "hello", "--url", url, "--max-tokens", "4", "--temperature", "0"]
        assert runner.invoke(app, ask).exit_code == 0
        load = ["--num-requests", "6", "--input-len", "8", "--output-len", "4", "--repeats", "2"]
        bench = runner.invoke(app, ["bench", "serve", "--url", url, *load, "--json", "-"])
        assert bench.exit_code == 0, bench.output
        (figures,) = json.loads(bench.stdout)["results"]
        assert (figures["requests"], figures["errors"]) == (12, 0)
        assert figures["output_tokens"] == 12 * 4
    finally:
        server.send_signal(signal.SIGTERM)
        said += server.communicate()[1]
    assert server.returncode == 0, said
    assert "load model" in said


def test_serve_fails_with_the_cause_as_its_last_line(tmp_path):
    done = subprocess.run(
        [
            *PLAIT,
            "serve",
            str(tmp_path),
            "--port",
            "0",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode in (1, 2)
    assert "holds no config.json" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
