"""The trace of steps: what its lines say, and that no trouble with its file reaches a request."""

import json
import logging
import os
from pathlib import Path

import pytest

from plait import LLM, SamplingParams
from plait.platform.core import StepPlan
from plait.platform.errors import ConfigError
from plait.platform.messages import Stats
from plait.platform.step_trace import StepTrace

PLAN = StepPlan(step_id=1, spans=())


def write(trace: StepTrace, **stats: object) -> None:
    trace.step(PLAN, [], Stats(**stats), began_s=0.0, num_adapters=0)  # type: ignore[arg-type]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_an_llm_add_up_to_what_it_computed(checkpoint, tmp_path):
    path = tmp_path / "steps"
    path.write_text('{"step":"of an earlier start"}\n')
    llm = LLM(
        str(checkpoint("llama")),
        kv_cache_bytes=8 << 20,
        num_threads=1,
        max_num_batched_tokens=16,
        speculation="off",
        trace_steps=str(path),
    )
    with llm:
        llm.generate([[5] * 20, [6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    first, *steps = lines(path)
    assert first == {"step": "of an earlier start"}
    rows = [step["rows"] for step in steps]
    assert sum(row["prefill"] for row in rows) == 22
    assert sum(row["decode"] for row in rows) == 6  # of four tokens each, the first is prefill's
    assert sum(step["tokens"] for step in steps) == 8
    told = [step["sequences"] for step in steps]
    assert sum(one["admitted"] for one in told) == 2
    assert sum(one["finished"] for one in told) == 2
    assert [step["step"] for step in steps] == sorted({step["step"] for step in steps})


def test_a_line_has_what_came_since_the_last(tmp_path):
    trace = StepTrace(str(tmp_path / "steps"), clock=lambda: 1.5)
    trace.begin(Stats(decode_rows=3, drafts={"model": (4, 1)}))
    write(trace, decode_rows=5, drafts={"model": (6, 2), "ngram": (0, 0)}, step_seconds=0.25)
    write(trace, decode_rows=5, drafts={"model": (6, 2), "ngram": (1, 0)}, step_seconds=0.5)
    one, two = lines(tmp_path / "steps")
    assert (one["rows"]["decode"], two["rows"]["decode"]) == (2, 0)
    assert (one["drafts"], two["drafts"]) == ({"model": [2, 1]}, {"ngram": [1, 0]})
    assert (one["time"], one["seconds"], two["seconds"]) == (1.5, 0.25, 0.25)
    trace.close()


def test_a_full_disk_ends_the_trace_once_and_nothing_else(caplog):
    trace = StepTrace("/dev/full")
    for _ in range(3):
        write(trace)
    assert not trace.is_open
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "serving goes on: No space left" in record.message


def test_the_trace_ends_at_its_limit(tmp_path, caplog):
    trace = StepTrace(str(tmp_path / "steps"), max_bytes=1000)
    for _ in range(9):
        write(trace)
    assert not trace.is_open
    assert 500 < (tmp_path / "steps").stat().st_size <= 1000
    assert len(lines(tmp_path / "steps")) >= 2
    assert "limit" in caplog.text


def test_a_pipe_nobody_empties_never_holds_the_engine_up(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be written"):
        StepTrace(str(tmp_path / "pipe"))
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    trace = StepTrace(str(tmp_path / "pipe"))
    for _ in range(1000):
        write(trace)
    assert not trace.is_open
    os.close(reader)


@pytest.mark.parametrize("path", ["missing/steps", "", "."])
def test_a_file_that_cannot_be_opened_is_refused_at_start(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--trace-steps") as refused:
        StepTrace(path)
    assert refused.value.param == "trace_steps"
