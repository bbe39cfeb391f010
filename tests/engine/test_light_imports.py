"""What a start imports: nothing of torch's compiler, and nothing is missing afterwards."""

import subprocess
import sys

from support.tiny_models import make_checkpoint

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
