"""Low-rank updates under sanitizers, without torch."""

import subprocess
from pathlib import Path

from support import sanitized

SOURCES = ["lora", "lora_avx2", "lora_avx512", "cpu_features", "tests/lora_test"]


def test_kernels_stay_within_their_memory_and_are_right(tmp_path: Path) -> None:
    program = sanitized.build(SOURCES, tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
