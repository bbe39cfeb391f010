"""Attention within segments under the address and undefined-behaviour sanitizers, without torch."""

import subprocess
from pathlib import Path

from support.sanitized import build

SOURCES = [
    "cpu_features",
    "varlen_attention",
    "varlen_attention_avx2",
    "varlen_attention_avx512",
    "tests/varlen_test",
]


def test_kernels_stay_within_their_memory_and_are_right(tmp_path: Path) -> None:
    done = subprocess.run([build(SOURCES, tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
