"""Reads the values of parameters as clients give them: each to its own type, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any


class InvalidParameter(ValueError):
    """A parameter has a value that cannot be served; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def integer(name: str, value: Any) -> int:
    """As a plain int; numpy's integers are welcome, booleans are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidParameter(name, f"{name} takes integers, got {value!r}")
    return int(value)


def integer_or_none(name: str, value: Any) -> int | None:
    """As `integer`, where None is a value, too."""
    return None if value is None else integer(name, value)


def number(name: str, value: Any) -> float:
    """As a finite float; booleans are not welcome."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise InvalidParameter(name, f"{name} must be a number, got {value!r}")
    return float(value)


def switch(name: str, value: Any) -> bool:
    """True or false, and nothing that counts as such."""
    if not isinstance(value, bool):
        raise InvalidParameter(name, f"{name} must be true or false, got {value!r}")
    return value


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, Mapping | bytes):
        raise InvalidParameter(name, f"{name} takes a list, got {value!r}")
    return tuple(value)


def strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, none of them empty."""
    texts = (value,) if isinstance(value, str) else _listed(name, value)
    if any(not isinstance(text, str) or not text for text in texts):
        raise InvalidParameter(name, f"{name} takes non-empty strings, got {value!r}")
    return texts


def integers(name: str, value: Any) -> tuple[int, ...]:
    """Several integers; None is none."""
    return tuple(integer(name, token) for token in _listed(name, value))
