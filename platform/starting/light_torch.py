"""Importing torch without its tables for tracing, in processes that are ours alone.

A quarter of torch's import is `torch.export` and `torch._meta_registrations`, Python that computes
shapes for exports and on meta tensors. A start from a stored program has none of either. Both are
imported when they are first wanted: `torch.export` by its name, the rest before anything else of
torch's tracing and before transformers. Whoever makes meta tensors without these calls `complete`.
A process that others write code for gets all of torch at once.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

_META = "torch._meta_registrations"
_EXPORT = "torch.export"
# What takes part in tracing, or brings it in, and imports only in the order that torch gives it.
_COMPLETED_BEFORE = frozenset(
    {_EXPORT, "torch._decomp", "torch._refs", "torch._prims", "torch._dynamo"}
    | {"torch._export", "torch._inductor", "torch.onnx", "torch.distributed.tensor", "transformers"}
)
# Of a process in a group, which has kernels of its own for meta tensors.
_DISTRIBUTED = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK"})
# About 0.1 ms: longer than a step is between two parallel loops. On two idle cores, batches of 8
# run a third faster than with 3,000, and 8 % slower than with OpenMP's own 300,000.
_SPINS = "10000"


def import_torch(*, light: bool = False) -> None:
    """Import torch; `light` without what only exports and meta tensors need, where it is not there.

    Its threads spin only briefly.
    """
    if "torch" in sys.modules:
        return
    with _brief_spins(), paused_collection():
        if not light or not _DISTRIBUTED.isdisjoint(os.environ):
            importlib.import_module("torch")
            return
        with _frames_of_known_modules():
            _import_light()
    # In a process of ours all of it stays, and a first look at it for cycles takes 0.1 s.
    gc.freeze()


def _import_light() -> None:
    for name in (_META, _EXPORT):
        sys.modules[name] = _Later(name)
    try:
        torch: Any = importlib.import_module("torch")
    finally:
        for name in (_META, _EXPORT):
            if isinstance(sys.modules.get(name), _Later):
                del sys.modules[name]
    sys.meta_path.insert(0, _Completion())
    for name in (_META, _EXPORT):
        short = name.removeprefix("torch.")
        vars(torch).pop(short, None)
        torch._lazy_modules.add(short)  # asks `importlib` for them when somebody names them


class _Later(ModuleType):
    """Stands for a module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _Completion:
    """An import finder that has the rest of torch imported before those, and finds what came so."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name not in _COMPLETED_BEFORE:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        complete()
        made = sys.modules.get(name)
        if made is None:
            return None
        made.__spec__ = ModuleSpec(name, _Made(made))  # where it is there, its own is what counts
        return made.__spec__


class _Made(Loader):
    """Gives a module that is there: it must not run twice."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__  # the one to have again

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        """See `importlib.abc.Loader`."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`."""
        module.__spec__ = self._spec


def complete() -> None:
    """Import what `import_torch` left out, where it did."""
    importlib.import_module(_META)


@contextmanager
def paused_collection() -> Iterator[None]:
    """Within, nobody looks for cycles: a tenth of an import's time, as nearly all of it stays."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _frames_of_known_modules() -> Iterator[None]:
    """Let `inspect` find a frame's module by the name that the frame has.

    Torch asks who registers an operator, once while it is imported, and `inspect` looks up the
    real path of every module's file to answer: 60 ms.
    """
    search = inspect.getmodule

    def getmodule(of: Any, _filename: str | None = None) -> ModuleType | None:
        name = of.f_globals.get("__name__", "") if isinstance(of, FrameType) else ""
        return sys.modules.get(name) or search(of, _filename)

    patched: Any = inspect
    patched.getmodule = getmodule
    try:
        yield
    finally:
        patched.getmodule = search


@contextmanager
def _brief_spins() -> Iterator[None]:
    """Let torch's threads spin only briefly where they wait for each other.

    GNU OpenMP reads this when it is loaded. By itself it spins 300,000 times, so that a thread that
    waits for one without a core keeps that core for milliseconds, in each of hundreds of loops a
    step: beside one other busy process, 48 tokens of SmolLM2 on two cores took 20 to 40 s, and 2 to
    6 s so.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.isdisjoint(os.environ):
        yield  # as the user wants it
        return
    os.environ["GOMP_SPINCOUNT"] = _SPINS
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]
