"""Options of an `LLM`: by keyword, each checked by name and type."""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import Any, get_type_hints

from plait.platform.config import Options
from plait.platform.errors import ConfigError


def options_of(model: str | os.PathLike[str] | None, fields: dict[str, Any]) -> Options:
    """`Options` of keywords. Raises `ConfigError` for an unknown one or a value of wrong type."""
    known = [f.name for f in dataclasses.fields(Options)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise ConfigError(f"LLM has no option {name}{hint}", param=name)
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    options = Options(model=model, **fields)
    for name, kind in get_type_hints(Options).items():
        value = getattr(options, name)
        if not isinstance(value, kind | int if kind is float else kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise ConfigError(
                f"{name} cannot be {value!r}: it takes {getattr(kind, '__name__', kind)}",
                param=name,
            )
    return options
