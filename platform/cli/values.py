"""How the text of a flag, a variable or a file becomes a value."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from plait.platform.errors import ConfigError
from plait.platform.server.settings import NamedSource

_NO_UNICODE = "the text is no UTF-8: convert it, such as by `iconv -f latin1 -t utf-8`"
_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def unicode_text(text: str) -> str:
    """`text`, unless bytes that are no UTF-8 hide in it. Raises `ConfigError`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(_NO_UNICODE) from None
    return text


def piped(read: Callable[[TextIO], str]) -> str:
    """What `read` gives of standard input. Raises `ConfigError` where that is closed or no UTF-8.

    Python refuses such bytes or smuggles them through, by the locale.
    """
    if sys.stdin is None:
        raise ConfigError("standard input is closed: there is nothing to read")
    try:
        return unicode_text(read(sys.stdin))
    except UnicodeDecodeError:
        raise ConfigError(_NO_UNICODE) from None


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "512MB", "1.5G" or "1073741824": KB is 1000, K and KiB are 1024."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError('a size such as "2GiB", "512MB" or a number of bytes')
    return int(float(match[1]) * unit)


def format_size(num_bytes: float) -> str:
    """The shortest text for a number of bytes that a person would write."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return (
                f"{num_bytes:.0f} {unit}"
                if num_bytes == int(num_bytes)
                else f"{num_bytes:.1f} {unit}"
            )
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def parse_bool(text: str) -> bool:
    """The truth of "true", "yes", "on", "1" and their opposites."""
    lowered = text.strip().lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return lowered in _TRUE


def parse_int(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def parse_float(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number") from None
    if not math.isfinite(value):
        raise ValueError("a finite number")
    return value


def parse_adapter(text: str) -> NamedSource:
    """An adapter's name with its directory or hub id: "sql=./sql", or vLLM's JSON form."""
    name, separator, source = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
            name, source = fields.pop("name"), fields.pop("path")
            fields.pop("base_model_name", None)  # there is one base
            separator = "" if fields else "="
        except (ValueError, KeyError):
            separator = ""
    if not separator or not all(isinstance(v, str) and v for v in (name, source)):
        raise ValueError('name=path, or {"name": …, "path": …}')
    return NamedSource(name=name, source=source)


def split_adapters(text: str) -> list[str]:
    """Several adapters in one text: separated by commas, or vLLM's JSON, an object or a list."""
    if text.lstrip()[:1] not in ("[", "{"):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        value = json.loads(text)
    except ValueError:
        return [text]  # reading it tells what is wanted
    items = value if isinstance(value, list) else [value]
    return [item if isinstance(item, str) else json.dumps(item) for item in items]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: how text becomes it, and which YAML types stand for it as they are."""

    name: str
    parse: Callable[[str], Any]
    native: tuple[type, ...]

    def from_yaml(self, value: object) -> Any:
        """The value of a YAML scalar; raises `ValueError` that says what is wanted."""
        if isinstance(value, bool) and bool not in self.native:
            raise ValueError(f"a {self.name}, not true or false")
        if isinstance(value, str):
            return self.parse(value)
        if not isinstance(value, self.native):
            raise ValueError(f"a {self.name}")
        return value


INT = Kind("whole number", parse_int, (int,))
FLOAT = Kind("number", parse_float, (int, float))
BOOL = Kind("boolean", parse_bool, (bool,))
TEXT = Kind("text", str, (str,))
SIZE = Kind("size", parse_size, (int,))

ADAPTER = Kind("name=path", parse_adapter, ())

BY_TYPE: dict[type, Kind] = {int: INT, float: FLOAT, bool: BOOL, str: TEXT}
