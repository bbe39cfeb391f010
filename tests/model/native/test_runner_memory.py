"""The thread pool, programs and their own kernels under sanitizers, without torch."""

import subprocess
from pathlib import Path

from support import sanitized

OWN_KERNELS = ("best_token", "layer_norm", "residual", "rope")
OTHERS = (
    "activation",
    "attention_checks",
    "cpu_features",
    "gated_activation",
    "kv_write",
    "linear",
    "lora",
    "lora_segments",
    "lora_weave",
    "paged_attention",
    "program_decode",
    "program_execution",
    "program_kernels",
    "program_runner",
    "program_step",
    "quantized_linear",
    "rms_norm",
    "thread_pool",
)


def run(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_programs_and_threads_stay_within_their_memory(tmp_path: Path) -> None:
    sources = [*OWN_KERNELS, *OTHERS, "tests/program_test"]
    run(sanitized.build(sources, tmp_path, x86=False))  # the kernels have tests of their own


def test_kernels_of_programs_stay_within_their_memory_and_are_right(tmp_path: Path) -> None:
    kernels = [f"{kernel}{isa}" for kernel in OWN_KERNELS for isa in ("", "_avx2", "_avx512")]
    run(sanitized.build([*kernels, "cpu_features", "tests/program_kernels_test"], tmp_path))
