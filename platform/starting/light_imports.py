"""Importing transformers' model code without the compilers and process groups that it brings in.

Its modules decorate a few functions for torch's compiler and name types of distributed tensors, and
so load nine hundred modules that a server on one machine, which compiles nothing, never uses: a
third of all processor time until the first token. Here they are loaded with stand-ins in their
place, and `torch.distributed.is_available` answers no meanwhile. torch does the same by itself, the
first time that it computes a shape on meta tensors: hence a model is built within
`without_compiler` too. Whoever asks a stand-in for more than it has, then or later, gets the real
module's; and so does every other thread, whatever it asks.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from plait.platform.starting.light_torch import complete

_COMPILER = "torch._dynamo"
_TRACING = "torch._dynamo._trace_wrapped_higher_order_op"
_SYMBOLS = "sympy"  # whose symbols torch looks for among the operands of meta tensors
_SHAPES = "torch.fx.experimental.symbolic_shapes"
_DISTRIBUTED = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK"})
_MARKS = ("assume_constant_result", "allow_in_graph", "disable")  # what decorators there are


def import_transformers() -> None:
    """Import what all of our model code needs of transformers."""
    complete()
    is_available, ours = torch.distributed.is_available, threading.get_ident()
    with without_compiler() as is_without:
        if is_without:
            torch.distributed.is_available = lambda: (
                threading.get_ident() != ours and is_available()
            )
        try:
            importlib.import_module("transformers.modeling_utils")
            importlib.import_module("transformers.masking_utils")
        finally:
            torch.distributed.is_available = is_available


@contextmanager
def without_compiler() -> Iterator[bool]:
    """Within, torch's compiler is not imported for marks that it alone reads.

    Gives whether it is so: not where it is there already.
    """
    if _COMPILER in sys.modules or not _DISTRIBUTED.isdisjoint(os.environ):
        yield False  # it is there already, or this process is one of a group and needs it all
        return
    sys.modules[_COMPILER] = _StandIn(_COMPILER, dict.fromkeys(_MARKS, _marked))
    sys.modules[_TRACING] = _StandIn(_TRACING, {"TransformGetItemToIndex": _IndexTracing})
    if _SYMBOLS not in sys.modules and _SHAPES not in sys.modules:
        sys.modules[_SYMBOLS] = _StandIn(_SYMBOLS, {"Basic": _Symbol})
        sys.modules[_SHAPES] = _StandIn(_SHAPES, _OF_NUMBERS)
    torch._dynamo = sys.modules[_COMPILER]
    try:
        yield True
    finally:
        _take_away()


def _take_away() -> None:
    for name in (_COMPILER, _TRACING, _SYMBOLS, _SHAPES):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    if isinstance(vars(torch).get("_dynamo"), _StandIn):
        del torch._dynamo


class _StandIn(ModuleType):
    """Has what transformers uses while it is imported; anything else brings the real module."""

    def __init__(self, name: str, has: dict[str, Any]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__dict__["_of"] = threading.get_ident(), has

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        thread, has = self.__dict__["_of"]
        if name in has and thread == threading.get_ident():
            return has[name]
        _take_away()
        return getattr(importlib.import_module(self.__name__), name)


def _marked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Stands for a decorator that tells the compiler something."""
    return (lambda inner: inner) if function is None else function


class _IndexTracing:
    """Stands for a class that only masks of some towers use; becomes the real one when made."""

    def __new__(cls) -> Any:
        return importlib.import_module(_TRACING).TransformGetItemToIndex()


class _Symbol:
    """Stands for a class of which there is nothing."""


def _no(*_: Any) -> bool:
    return False


def _yes(*_: Any) -> bool:
    return True


def _is_equal(one: Any, other: Any) -> bool:
    return list(one) == list(other) if isinstance(one, tuple | list) else bool(one == other)


# What torch asks of shapes, where they are plain numbers.
_OF_NUMBERS: dict[str, Callable[..., Any]] = {
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "expect_true": bool,
    "statically_known_true": bool,
    "is_nested_int": _no,
    "has_guarding_hint": _yes,
    "guarding_hint_or_throw": int,
    "sym_and": lambda *parts: all(parts),
    "sym_or": lambda *parts: any(parts),
    "sym_eq": _is_equal,
}
