"""`plait version`: what is installed, and what this machine computes with."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Annotated

import typer

_PACKAGES = ("plait", "torch", "transformers", "tokenizers", "fastapi")
# Instruction sets that decide which kernels run, widest last.
_ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "i8mm", "sve")


def version(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", show_default=False)
    ] = False,
) -> None:
    """Print the versions of plait and of what it stands on."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")


def collect() -> dict[str, str]:
    """Versions by name. Reads package metadata only: importing torch would take seconds."""
    facts = {name: _version_of(name) for name in _PACKAGES}
    facts["python"] = platform.python_version()
    facts["machine"] = f"{platform.system()} {platform.machine()}"
    facts["instructions"] = ", ".join(_instructions()) or "unknown"
    facts["kernels"] = "built" if _has_kernels() else "not built: plain torch references are used"
    return facts


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _instructions() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    present = set(flags.partition(":")[2].split())
    return [name for name in _ISA if name in present]


def _has_kernels() -> bool:
    import plait

    return any(file.is_file() for base in plait.__path__ for file in Path(base).glob("_C*.so"))
