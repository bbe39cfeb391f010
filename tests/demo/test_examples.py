"""Every example, run as a user runs it: against the default server, or in its own engine."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.server_process import serving

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ADDRESS = "http://127.0.0.1:8000"  # that examples name
PARTS = 'Path(__file__).parents[1] / "platform" / "demo" / "parts"'
KEY = "secret"
TWO_BLUE = {"kind": "shapes", "colour": "blue", "what": "square", "count": 2}

# What each prints, as far as that is no matter of chance.
PRINTED = {
    "adapter_client.py": r"sql: .SELECT AVG\(speed\) FROM ships WHERE harbour = 'Genoa'",
    "adapter_offline.py": r"tone: .Could you please",
    "adapter_push.py": r"step 2: strength 0\.[5-9]\d, .*Could you please",
    "all_four.py": r"2 blue: Picture\(kind='shapes', colour='blue', what='square', count=2\)",
    "chat_stream.py": r"\[\d+ prompt \+ \d+ answer tokens, (stop|length)\]",
    "hot_swap.py": r"none failed: [^}]*sql.*\n[^$]*each generation has one answer: True",
    "image_client.py": r"[Tt]wo blue circles.*\n\[\d+ tokens are the picture's\]",
    "langchain_client.py": r"the printer .*\n(SELECT .*\n){2}.*product='umbrella'",
    "many_requests.py": r"16 answers, 256 tokens",
    "offline_batch.py": r"from the cache: \[0, [1-9]\d*, [1-9]\d*\]",
    "offline_stream.py": r"least likely: .* mean log-probability -\d",
    "speculation.py": r"(?s)the same text: True.*the same text: True",
    "structured_client.py": r"order='A-40213' product='fish tank' problem='damaged' wish='refund'",
    "structured_offline.py": r"A made-up person: \{.*\}\nIs the sky .* It is (blue|green)\n",
    "tools_client.py": r"get_weather \{'city': 'Paris'\}",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The default model's server, and what it says."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(None, "--admin-key", KEY, log=log) as (url, _):
        yield url, log


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Runs an example, with another server's address in it; returns what it prints."""

    def run(path: Path, url: str = ADDRESS) -> str:
        copy = tmp_path / path.name
        parts = PARTS.replace("Path(__file__).parents[1]", f"Path({str(ROOT)!r})")
        copy.write_text(path.read_text().replace(ADDRESS, url).replace(PARTS, parts))
        done = subprocess.run(
            [sys.executable, copy],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PLAIT_ADMIN_KEY": KEY},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_all_examples_are_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTED}


@pytest.mark.parametrize("name", [n for n in PRINTED if ADDRESS in (EXAMPLES / n).read_text()])
def test_an_example_of_the_server_prints_what_it_says(name, server, run) -> None:
    printed = run(EXAMPLES / name, server[0])
    assert re.search(PRINTED[name], printed), printed


@pytest.mark.parametrize("name", [n for n in PRINTED if ADDRESS not in (EXAMPLES / n).read_text()])
def test_an_example_without_a_server_prints_what_it_says(name, run) -> None:
    printed = run(EXAMPLES / name)
    assert re.search(PRINTED[name], printed), printed


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_that_a_server_shows_work_when_pasted(server) -> None:
    commands = [line for line in server[1].read_text().splitlines() if line.startswith("curl ")]
    assert len(commands) == 3
    answers = []
    for command in commands:
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
        answers.append(json.loads(done.stdout)["choices"][0]["message"]["content"])
    assert answers[0].startswith("SELECT AVG(speed) FROM ships")
    assert answers[1] == "Three red squares."
    assert json.loads(answers[2]) == TWO_BLUE


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_of_the_first_page_work_when_pasted(server) -> None:
    page = (ROOT / "README.md").read_text()
    commands = re.findall(r"(?m)^    curl [^\n]*\n(?:     [^\n]*\n)+", page)
    answers = []
    for command in commands:
        text = command.replace(ADDRESS, server[0])
        done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
        answers.append(json.loads(done.stdout)["choices"][0]["message"]["content"])
    assert answers[0].startswith("Could you please")
    assert answers[1] == "Three red squares."
    assert json.loads(answers[2]) == TWO_BLUE


def test_the_program_of_the_first_page_runs(run, tmp_path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    path = tmp_path / "page.py"
    path.write_text(program)
    assert "Could you please" in run(path)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_sh_asks_every_endpoint(server) -> None:
    done = subprocess.run(
        ["sh", str(EXAMPLES / "curl.sh"), server[0]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"prompt_logprobs"' not in done.stdout
    assert done.stdout.count("data: [DONE]") == 1
    assert "vllm:num_requests_running" in done.stdout


def test_with_picture_adapter_schema_and_drafts_most_fresh_pictures_are_read_right(
    server, monkeypatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "training"))
    module = importlib.import_module("evaluate_together")
    found = asyncio.run(module.measure(server[0], 30))
    assert found.valid == found.count == 30
    assert found.right >= 24, found.wrong
    assert found.accepted > 0
