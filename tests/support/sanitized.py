"""Builds a C++ test of kernels under the address and undefined-behaviour sanitizers."""

import fcntl
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
X86 = platform.machine() in ("x86_64", "AMD64")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = tuple(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16")) + AVX2[1:]
FLAGS = {"_avx2": AVX2, "_avx512": AVX512, "_vnni": (*AVX512, "-mavx512vnni")}
# Without it, no function of such a file is ever run.
NEEDS = {"_avx2": "avx2", "_avx512": "avx512f", "_vnni": "avx512_vnni"}


def _runs_here(name: str) -> bool:
    try:
        known = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return True
    return all(feature in known for end, feature in NEEDS.items() if name.endswith(end))


def with_instruction_sets(kernel: str) -> list[str]:
    """The names of a kernel's files: for any processor, and for each instruction set it has."""
    return [f"{kernel}{end}" for end in ("", *FLAGS) if (CSRC / f"{kernel}{end}.cpp").exists()]


def build(sources: list[str], folder: Path) -> Path:
    """Compiles csrc/*.cpp of these names into a program in `folder`.

    Files for an instruction set, by the end of their name, are left out on other processors; of
    one that this processor lacks they are only there to be linked, without sanitizers. Nothing is
    optimised: that compiles several times faster than with -O1, and no check can be optimised away.
    Skips the test where no compiler with sanitizers is at hand. What a file is compiled to is kept
    for the other tests of this run, whichever worker runs them.
    """
    cxx = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if cxx is None:
        pytest.skip("no C++ compiler")
    (folder / "empty.cpp").write_text("int main() {}\n")
    probe = [cxx, *SANITIZE, str(folder / "empty.cpp"), "-o", str(folder / "empty")]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("the compiler has no sanitizers")

    kept = Path(os.environ["XDG_CACHE_HOME"], "sanitized", cxx.replace("/", "_"))
    kept.mkdir(parents=True, exist_ok=True)

    def compile_one(name: str) -> str:
        flags = next((FLAGS[end] for end in FLAGS if name.endswith(end)), ())
        target = kept / (name.replace("/", "_") + ".o")
        options = ["-std=c++20", "-O0", f"-DPLAIT_HAS_X86_SOURCES={int(X86)}", f"-I{CSRC}"]
        checks = SANITIZE if _runs_here(name) else ()
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                part = target.with_suffix(".part")
                source = ["-c", str(CSRC / f"{name}.cpp"), "-o", str(part)]
                subprocess.run([cxx, *options, *checks, *flags, *source], check=True)
                part.replace(target)
        return str(target)

    names = [name for name in sources if X86 or not name.endswith(tuple(FLAGS))]
    # Of an inline function in several files the linker takes the first: the one with sanitizers.
    names.sort(key=_runs_here, reverse=True)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, names))
    subprocess.run([cxx, *SANITIZE, *objects, "-o", str(folder / "test")], check=True)
    return folder / "test"
