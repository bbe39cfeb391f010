"""`plait_adapter.json`: what else belongs to an adapter, versioned with its weights.

An optional file beside the weights. All fields are optional, and none is ignored: an unknown one
is refused, since a stop that is not obeyed is worse than an adapter that is not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.adapters.files import BUNDLE, FileLimits, parse_json
from plait.platform.errors import InvalidAdapter

_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 512
_MAX_TEMPLATE = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Defaults of requests to one adapter; a request's own fields go before them."""

    chat_template: str | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, int | float] = field(default_factory=dict)  # by field of a request
    response_format: Mapping[str, Any] | None = None  # as in a chat request
    draft_adapter: str | None = None  # folder beside the weights; see `draft_adapter`


def parse_bundle(data: bytes, limits: FileLimits | None = None) -> Bundle:
    """Read a bundle. Raises `InvalidAdapter`, which names the field at fault."""
    content = parse_json(data, BUNDLE, limits or FileLimits())
    if not isinstance(content, dict):
        raise InvalidAdapter(f"{BUNDLE} is not a JSON object")
    unknown = sorted(content.keys() - _READERS.keys())
    if unknown:
        _refuse(unknown[0], "there is no such field; known are " + ", ".join(_READERS))
    return Bundle(**{name: _READERS[name](name, value) for name, value in content.items()})


def _refuse(name: str, why: str) -> None:
    raise InvalidAdapter(f"{BUNDLE}: {name[:100]}: {why}", param=name[:100])


def _template(name: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEMPLATE:
        _refuse(name, f"text of at most {_MAX_TEMPLATE} characters is wanted")
    return str(value)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        _refuse(name, f"text, or a list of at most {_MAX_STOPS} texts is wanted")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= _MAX_STOP_LENGTH:
            _refuse(name, f"each is text of 1 to {_MAX_STOP_LENGTH} characters")
    return tuple(stops)


# Field of a request → smallest and largest value, and whether it is a whole number.
_SAMPLING: Mapping[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 2.0, False),
    "top_p": (0.0, 1.0, False),
    "top_k": (-1, 1 << 30, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.01, 100.0, False),
    "max_tokens": (1, 1 << 30, True),
}


def _sampling(name: str, value: Any) -> Mapping[str, int | float]:
    if not isinstance(value, dict):
        _refuse(name, "an object of fields such as temperature is wanted")
    for key, number in value.items():
        if key not in _SAMPLING:
            _refuse(f"{name}.{key}", "known are " + ", ".join(_SAMPLING))
        low, high, is_whole = _SAMPLING[key]
        kinds = (int,) if is_whole else (int, float)
        if isinstance(number, bool) or not isinstance(number, kinds) or not low <= number <= high:
            _refuse(f"{name}.{key}", f"{low} … {high} is wanted")
    return dict(value)


def _response_format(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        _refuse(name, 'an object with a "type" is wanted, as in a chat request')
    return dict(value)


def _folder(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _FOLDER.fullmatch(value):
        _refuse(name, "the name of a folder beside this file is wanted: letters, digits, - _ .")
    return str(value)


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "chat_template": _template,
    "stop": _stop,
    "sampling": _sampling,
    "response_format": _response_format,
    "draft_adapter": _folder,
}
