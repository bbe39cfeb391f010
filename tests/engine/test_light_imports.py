"""What a start imports: nothing of torch's compiler, and nothing is missing afterwards."""

import subprocess
import sys

import pytest
from support.tiny_models import make_checkpoint

from plait import LLM
from plait.platform.model import kept_weights

SCRIPT = """
import sys
from plait.platform.config import Options
from plait.platform.start import start_engine

started = start_engine(Options(model=sys.argv[1], max_model_len=64, num_threads=1, progress=False))
assert started.engine.config.model.executor == "native"
heavy = ("torch._dynamo", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes")
print([name for name in (*heavy, "sympy") if name in sys.modules])

import importlib.util, sympy, torch

assert sympy.Symbol("x") - sympy.Symbol("x") == 0
assert importlib.util.find_spec("torch._dynamo").origin.endswith("__init__.py")
assert "_dynamo" not in vars(torch)
assert torch.distributed.is_available()
"""


def test_a_start_leaves_the_compiler_out_and_whoever_wants_it_gets_it(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


TEXT = """
import sys
from plait import LLM, SamplingParams

model, cache = sys.argv[1:]
llm = LLM(model, packed_cache=cache, max_model_len=64, progress=False, encoder_cache_bytes=0)
llm.generate("a b", SamplingParams(max_tokens=2))
print([name for name in ("jinja2", "PIL", "transformers") if name in sys.modules])
"""


def test_texts_are_completed_without_what_chats_and_images_need(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_weights, "MIN_BYTES", 0)
    directory, cache = str(make_checkpoint("llama", tmp_path / "model")), str(tmp_path / "cache")
    LLM(directory, packed_cache=cache, max_model_len=64, encoder_cache_bytes=0).close()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TEXT, directory, cache],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


OTHER_THREAD = """
import sys, threading
import torch
from plait.platform.starting.light_imports import without_compiler

found = {}

def other():
    import sympy
    from sympy import Basic
    import torch._dynamo
    from torch.fx.experimental.symbolic_shapes import guard_or_false
    found.update(basic=Basic, module=sys.modules["sympy"], disable=torch._dynamo.disable)

with without_compiler() as is_without:
    assert is_without
    from sympy import Basic as stand_in
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()

import sympy

assert found["basic"] is sympy.Basic is not stand_in
assert found["module"] is sympy
assert found["disable"].__module__.startswith("torch._dynamo")
"""

LIGHT = """
import sys
from plait.platform.starting.light_torch import import_torch

import_torch(light=True)
import torch

later = ("torch.export", "torch._meta_registrations", "sympy")
print([name for name in later if name in sys.modules])
import inspect

assert inspect.getmodule.__module__ == "inspect"
torch.ones(3).sum()
{first}
assert torch.export.export.__module__.startswith("torch.export")
assert torch.zeros(2, 3, device="meta").cumsum(0).shape == (2, 3)
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
assert "torch._meta_registrations" in sys.modules
print("whole")
"""


def run(script):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_other_threads_get_the_real_modules_meanwhile():
    run(OTHER_THREAD)


@pytest.mark.parametrize(
    "first",
    [
        "import torch._decomp",
        "import torch._dynamo",
        "from torch.export import Dim",
        "import transformers",
        "import torch.distributed.tensor",
        "torch.export",
    ],
)
def test_what_torch_was_imported_without_comes_whoever_asks_first(first):
    assert run(LIGHT.format(first=first)) == ["[]", "whole"]
