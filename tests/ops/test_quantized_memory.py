"""Linear layers over quantised weights under sanitizers, without torch."""

import subprocess
from pathlib import Path

from support import sanitized


def test_kernels_stay_within_their_memory_and_are_right(tmp_path: Path) -> None:
    kernels = [f"quantized_linear{isa}" for isa in ("", "_avx2", "_avx512", "_vnni")]
    program = sanitized.build([*kernels, "cpu_features", "tests/quantized_test"], tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
