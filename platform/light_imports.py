"""Importing transformers' model code without the compilers and process groups that it brings in.

Its modules decorate a few functions for torch's compiler and name types of distributed tensors, and
so load nine hundred modules that a server on one machine, which compiles nothing, never uses: more
than half of the time that all imports take. Here they are loaded with stand-ins in their place, as
`torch.distributed.is_available` is asked and answers no. Whoever asks for the real ones, later or
in between, gets them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed

_COMPILER = "torch._dynamo"
_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
_DISTRIBUTED = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK"})
_MARKS = ("assume_constant_result", "allow_in_graph", "disable")  # what decorators there are


def import_transformers() -> None:
    """Import what all of our model code needs of transformers."""
    with _stand_ins():
        importlib.import_module("transformers.modeling_utils")
        importlib.import_module("transformers.masking_utils")


@contextmanager
def _stand_ins() -> Iterator[None]:
    if _COMPILER in sys.modules or not _DISTRIBUTED.isdisjoint(os.environ):
        yield  # it is there already, or this process is one of a group and needs it all
        return
    is_available = torch.distributed.is_available
    sys.modules[_COMPILER] = _StandIn(_COMPILER, dict.fromkeys(_MARKS, _marked))
    sys.modules[_TRACING] = _StandIn(_TRACING, {"TransformGetItemToIndex": _IndexTracing})
    torch._dynamo = sys.modules[_COMPILER]  # type: ignore[attr-defined]
    torch.distributed.is_available = _no
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
        _take_away()


def _take_away() -> None:
    for name in (_COMPILER, _TRACING):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    if isinstance(vars(torch).get("_dynamo"), _StandIn):
        del torch._dynamo


class _StandIn(ModuleType):
    """Has what transformers uses while it is imported; anything else brings the real module."""

    def __init__(self, name: str, has: dict[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__dict__.update(has)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _take_away()
        return getattr(importlib.import_module(self.__name__), name)


def _marked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Stands for a decorator that tells the compiler something."""
    return (lambda inner: inner) if function is None else function


class _IndexTracing:
    """Stands for a class that only masks of some towers use; becomes the real one when made."""

    def __new__(cls) -> Any:
        return importlib.import_module(_TRACING).TransformGetItemToIndex()


def _no() -> bool:
    return False
