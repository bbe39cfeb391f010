"""The attention kernels under the address and undefined-behaviour sanitizers, without torch."""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
X86 = platform.machine() in ("x86_64", "AMD64")
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = {
    "paged_attention_avx2": "-mavx2 -mfma -mf16c",
    "paged_attention_avx512": (
        "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma -mf16c"
    ),
}
SOURCES = ("cpu_features", "kv_write", "paged_attention", "tests/attention_test")


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    return found or pytest.skip("no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cxx, folder = compiler(), tmp_path_factory.mktemp("sanitized")
    (folder / "empty.cpp").write_text("int main() {}\n")
    probe = [cxx, *SANITIZE, str(folder / "empty.cpp"), "-o", str(folder / "empty")]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("the compiler has no sanitizers")

    def compile_one(name: str) -> str:
        target = folder / (name.replace("/", "_") + ".o")
        options = ["-std=c++20", "-O0", f"-DPLAIT_HAS_X86_SOURCES={int(X86)}", f"-I{CSRC}"]
        source = ["-c", str(CSRC / f"{name}.cpp"), "-o", str(target)]
        command = [cxx, *options, *SANITIZE, *FLAGS.get(name, "").split(), *source]
        subprocess.run(command, check=True)
        return str(target)

    names = [*SOURCES, *(FLAGS if X86 else ())]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, names))
    subprocess.run([cxx, *SANITIZE, *objects, "-o", str(folder / "test")], check=True)
    return folder / "test"


def test_kernels_stay_within_their_memory_and_are_right(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
