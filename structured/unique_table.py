"""The table that uniqueness is kept by, loaded; and items as JSON Schema compares them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from plait.structured.schema import regex
from plait.structured.schema.counting import Language, from_json
from plait.structured.schema.derive import matches

PLAIN = -1  # the state of values in which nothing must be unique
_MAX_EXPONENT = 400
_MAX_DIGITS = 4_000  # more than Python reads as an integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known of a value; see `plait.structured.schema.uniqueness`."""

    names: Mapping[str, int]
    patterns: tuple[tuple[regex.Node, int], ...]
    rest: int  # of all other keys
    prefix: tuple[int, ...]
    items: int
    unique: bool
    open: bool  # as an object it can always get one more key
    endless: bool  # as a list, one more item
    order: tuple[str, ...]  # of a closed object's keys
    last: int  # the last of them whose value can differ without end; -1: none
    # Of scalars that are items, or the value of the last key; None: any that the grammar allows.
    strings: Language | None
    others: Language | None  # numbers, true, false, null
    size: int | None  # how many items there can be

    def under(self, key: str) -> int:
        """The state of the value under a key."""
        if key in self.names:
            return self.names[key]
        return next((to for node, to in self.patterns if matches(node, key)), self.rest)

    def at(self, index: int) -> int:
        """The state of an item."""
        return self.prefix[index] if index < len(self.prefix) else self.items

    def place(self, key: str) -> int:
        """Where a key of a closed object stands; of others, nowhere."""
        return self.order.index(key) if key in self.order else -1


@dataclass(frozen=True, slots=True)
class Table:
    """All rows, and the state of the whole text."""

    root: int
    rows: tuple[Row, ...]

    def row(self, state: int) -> Row | None:
        """None for values in which nothing must be unique."""
        return None if state == PLAIN else self.rows[state]


@lru_cache(maxsize=64)
def load(checks: bytes) -> Table:
    """The table in `CompiledGrammar.checks`."""
    found = json.loads(checks)
    languages = [from_json(each) for each in found["languages"]]
    return Table(found["root"], tuple(_row(each, languages) for each in found["states"]))


def _row(found: dict[str, Any], languages: list[Language]) -> Row:
    strings, others = found.get("scalars", (None, None))
    return Row(
        names=found["names"],
        patterns=tuple((regex.search(p), to) for p, to in found.get("patterns", ())),
        rest=found["rest"],
        prefix=tuple(found.get("prefix", ())),
        items=found["items"],
        unique=found.get("unique", False),
        open=found.get("open", False),
        endless=found.get("endless", False),
        order=tuple(found.get("order", ())),
        last=found.get("last", -1),
        strings=None if strings is None else languages[strings],
        others=None if others is None else languages[others],
        size=found.get("size"),
    )


# --- items ---


@dataclass(frozen=True, slots=True)
class Item:
    """A value in two readings: numbers exact, and as binary floating point has them.

    By either, equal values count as a repetition: most who read the text later do by the second.
    """

    text: str  # of a string, its characters; of other scalars, their one spelling
    exact: Any
    rounded: Any
    key: Any = field(init=False)  # equal for equal values
    rounded_key: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _key(self.exact))
        same = self.rounded is self.exact
        object.__setattr__(self, "rounded_key", self.key if same else _key(self.rounded))

    @classmethod
    def read(cls, text: str) -> Item:
        """The item of a JSON text."""
        rounded = json.loads(text, parse_int=_integer)
        if "." in text or "e" in text or "E" in text:
            exact = json.loads(text, parse_int=_integer, parse_float=_exact)
        else:
            exact = rounded
        return cls(_spelled(exact), exact, rounded)

    @classmethod
    def of(cls, value: Any) -> Item:
        """That of a value by its exact reading."""
        return cls(_spelled(value), value, value)

    def equals(self, other: Item) -> bool:
        """Whether JSON Schema, or its readers, see the same value in both."""
        return bool(self.key == other.key or self.rounded_key == other.rounded_key)


def _spelled(value: Any) -> str:
    """A scalar as languages spell it, where they do."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict | list):
        return ""
    if not value:
        return "0"
    if isinstance(value, Decimal) and abs(value.adjusted()) < _MAX_EXPONENT:
        return format(value.normalize(), "f")
    return str(value) if isinstance(value, int) else ""


def _key(value: Any) -> Any:
    """A value that can be hashed, and in which true is not 1."""
    if isinstance(value, bool):
        return ("bool", value)
    if isinstance(value, list):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, _key(inner)) for name, inner in value.items()))
    return value


def is_same(one: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    return bool(one == other)


def _integer(text: str) -> Any:
    return int(text) if len(text) < _MAX_DIGITS else _exact(text)


def _exact(text: str) -> Any:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all bounds
        return text
