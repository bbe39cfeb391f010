"""Resampling and look-ups of pixels under sanitizers, without torch."""

import subprocess
from pathlib import Path

from support import sanitized


def test_kernels_stay_within_their_memory_and_agree(tmp_path: Path) -> None:
    sources = ["resample", "resample_avx2", "resample_axis", "pixels", "cpu_features"]
    program = sanitized.build([*sources, "tests/pixels_test"], tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
