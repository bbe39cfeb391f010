"""The thread pool, programs and their own kernels under sanitizers, without torch."""

import subprocess
from itertools import chain
from pathlib import Path

from support.sanitized import build, with_instruction_sets

OWN_KERNELS = ("best_token", "layer_norm", "residual", "rope")
OTHER_KERNELS = (
    "activation",
    "gated_activation",
    "linear",
    "lora",
    "paged_attention",
    "quantized_linear",
    "rms_norm",
)
REST = (
    "attention_checks",
    "cpu_features",
    "kv_write",
    "lora_segments",
    "lora_weave",
    "program_decode",
    "program_execution",
    "program_kernels",
    "program_runner",
    "program_step",
    "thread_pool",
)


def run(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_programs_and_threads_stay_within_their_memory(tmp_path: Path) -> None:
    kernels = chain.from_iterable(map(with_instruction_sets, (*OWN_KERNELS, *OTHER_KERNELS)))
    run(build([*kernels, *REST, "tests/program_test"], tmp_path))


def test_kernels_of_programs_stay_within_their_memory_and_are_right(tmp_path: Path) -> None:
    kernels = chain.from_iterable(map(with_instruction_sets, OWN_KERNELS))
    run(build([*kernels, "cpu_features", "tests/program_kernels_test"], tmp_path))
