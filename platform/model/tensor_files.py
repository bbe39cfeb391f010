"""Where weights are read from: tensors by name, one at a time. Safetensors are the usual files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.platform.errors import ModelUnsupported
from plait.platform.model.weight_format import WeightFormat
from plait.platform.ops.quantized_weight import Quantized

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """Tensors by name, read one at a time."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of all tensors, by name."""

    @property
    def dtypes(self) -> frozenset[str]:
        """How they are stored: safetensors' names of dtypes, or GGUF's of types."""

    @property
    def integers(self) -> frozenset[str]:
        """Tensors that hold whole numbers, and so no weights."""

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """Of the tensors that `read_quantized` gives."""

    def read(self, name: str) -> Tensor:
        """Read one tensor, in the dtype it is stored in, or what its codes stand for."""

    def read_quantized(self, name: str) -> Quantized:
        """Read one tensor of `formats` as it is stored; it may have more dimensions than two."""


class SafetensorsFiles:
    """The safetensors files of a checkpoint directory; headers read, tensors on demand."""

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, Shape] = {}
        self._kinds: dict[str, str] = {}
        for path in safetensors_paths(directory):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelUnsupported(
                    f"{path.name} cannot be read ({error}): the file is truncated or damaged"
                ) from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self._shapes:
                    raise ModelUnsupported(
                        f"{name} is in two files, {path.name} is one: which is meant nobody can "
                        "tell; remove the files that do not belong to this checkpoint"
                    )
                header = file.get_slice(name)
                self._shapes[name] = tuple(header.get_shape())
                self._kinds[name] = header.get_dtype()
                self._files[name] = file

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """From the files' headers."""
        return self._shapes

    @property
    def dtypes(self) -> frozenset[str]:
        """From the files' headers."""
        return frozenset(self._kinds.values())

    @property
    def kinds(self) -> Mapping[str, str]:
        """How each tensor is stored, in safetensors' words."""
        return self._kinds

    @property
    def integers(self) -> frozenset[str]:
        """From the files' headers."""
        return frozenset(n for n, kind in self._kinds.items() if kind.startswith(("I", "U", "BO")))

    @property
    def formats(self) -> Mapping[str, WeightFormat]:
        """None: these are plain tensors."""
        return {}

    def read_quantized(self, name: str) -> Quantized:
        """Nothing of these is quantised."""
        raise KeyError(name)

    def read(self, name: str) -> Tensor:
        """Read one tensor; its pages are the file's until someone copies them."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def safetensors_paths(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's weights.

    Raises `ModelUnsupported` where they are not whole, or of a kind that is never read.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelUnsupported(f"{index.name} cannot be read: {error}") from error
        missing = [name for name in named if not (directory / name).exists()]
        if missing:
            raise ModelUnsupported(
                f"{len(missing)} of {len(named)} shards are missing: {some(missing)}"
            )
        return [directory / name for name in named]
    found = sorted(directory.glob("*.safetensors"))
    if (directory / "model.safetensors").exists():
        return [directory / "model.safetensors"]
    if found:
        return found
    pickles = sorted(p.name for p in directory.glob("*.bin")) + sorted(
        p.name for p in directory.glob("*.pt*")
    )
    if pickles:
        raise ModelUnsupported(
            f"the weights are Python pickles ({pickles[0]}), which can run code and are never "
            "loaded; convert them to safetensors (`model.save_pretrained(...)` does)"
        )
    raise ModelUnsupported(f"{directory.name} holds no safetensors file")


def some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
