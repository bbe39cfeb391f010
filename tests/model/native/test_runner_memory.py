"""The thread pool and programs under sanitizers, without torch."""

import subprocess
from pathlib import Path

from support import sanitized

KERNELS = (
    "activation",
    "gated_activation",
    "layer_norm",
    "linear",
    "lora",
    "paged_attention",
    "quantized_linear",
    "residual",
    "rms_norm",
    "rope",
)
PLAIN = (
    "attention_checks",
    "cpu_features",
    "kv_write",
    "lora_segments",
    "program_decode",
    "program_execution",
    "program_kernels",
    "program_runner",
    "program_step",
    "thread_pool",
)


def test_programs_and_threads_stay_within_their_memory(tmp_path: Path) -> None:
    kernels = [f"{kernel}{isa}" for kernel in KERNELS for isa in ("", "_avx2", "_avx512")]
    kernels = [name for name in kernels if (sanitized.CSRC / f"{name}.cpp").exists()]
    program = sanitized.build([*kernels, *PLAIN, "tests/program_test"], tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
