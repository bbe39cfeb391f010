"""What a start settles before it loads anything."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.platform.config import Options
from plait.platform.errors import ConfigError, ModelUnsupported
from plait.platform.start import start_engine

# A start that goes as far as torch: what loads models, and takes seconds to import, is not there.
START = """
import os, sys
from plait.platform.config import Options
from plait.platform.start import start_engine
sys.modules["plait.platform.model"] = None
try:
    start_engine(Options())
except ModuleNotFoundError:
    print(os.environ.get("GOMP_SPINCOUNT"))
"""


def uses_gnu_openmp() -> bool:
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations
    return any(Path(torch, "lib").glob("libgomp*"))


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    return subprocess.run(
        [sys.executable, "-c", START],
        env={**kept, "OMP_DISPLAY_ENV": "VERBOSE", **environment},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.skipif(not uses_gnu_openmp(), reason="torch's threads are not GNU OpenMP's here")
def test_threads_wait_awake_only_briefly_unless_the_user_says_how_long():
    own = start()
    assert "GOMP_SPINCOUNT = '10000'" in own.stderr
    assert own.stdout == "None\n", "later processes inherit nothing"
    users = start(GOMP_SPINCOUNT="77")
    assert "GOMP_SPINCOUNT = '77'" in users.stderr
    assert users.stdout == "77\n"
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in start(OMP_WAIT_POLICY="ACTIVE").stderr


@pytest.mark.parametrize(
    ("name", "error"), [("nowhere/at/all", ConfigError), (".", ModelUnsupported)]
)
def test_a_draft_that_is_none_is_refused_before_the_model_is_loaded(
    name, error, checkpoint, tmp_path
):
    phases = []
    options = Options(model=str(checkpoint("llama")), draft_model=str(tmp_path / name))
    with pytest.raises(error, match="--draft: ") as caught:
        start_engine(options, lambda phase, _: phases.append(phase))
    assert caught.value.param == "draft_model"
    assert "load model" not in phases


def test_an_instruction_set_that_is_not_there_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv("PLAIT_CPU_ISA", "avx1024")
    with pytest.raises(ConfigError, match="--cpu-isa: PLAIT_CPU_ISA=avx1024 is unknown"):
        start_engine(Options(model="nowhere/nothing"))
