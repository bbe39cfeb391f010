"""The atoms that schemas are read into: each says one thing about values of one type.

A `Literal` is a place in the schema, affirmed or denied; a `Formula` is the conjunction of some.
What an atom says of inner values, it says by formulas, so that reading goes only as deep as it
must. `at` is where the atom was written; it takes no part in equality.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from plait.structured.schema.refusal import Refusal
from plait.structured.schema.regex import Node


class Literal(NamedTuple):
    """The schema at a pointer, or its denial."""

    pointer: str
    positive: bool


Formula = frozenset[Literal]
TRUE: Formula = frozenset()
NEVER: Formula = frozenset({Literal("never", True)})

_A = TypeVar("_A", bound="Atom")


class Atom:
    """Base of all. A hash is found once: branches are looked up at each step of a merge."""

    __slots__ = ("_hash",)
    _hash: int


def _hashed_once(made: type[_A]) -> type[_A]:
    in_full = made.__hash__

    def known(self: _A) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", in_full(self))
            return self._hash

    made.__hash__ = known  # type: ignore[assignment]
    return made


@_hashed_once
@dataclass(frozen=True, slots=True)
class Values(Atom):
    """One of these values, by their identities."""

    values: tuple[str, ...]


@_hashed_once
@dataclass(frozen=True, slots=True)
class NotValues(Atom):
    """None of these values."""

    values: tuple[str, ...]


@_hashed_once
@dataclass(frozen=True, slots=True)
class Poison(Atom):
    """Something that cannot be said by atoms. Harmless only where its branch dies."""

    refusal: Refusal


@_hashed_once
@dataclass(frozen=True, slots=True)
class Untold(Atom):
    """Nothing; but the branch is left out of what is written, where others are written.

    `whole`: the branch beside it tells which values these are.
    """

    refusal: Refusal
    whole: bool = True


@_hashed_once
@dataclass(frozen=True, slots=True)
class Integer(Atom):
    """A number without fraction."""


@_hashed_once
@dataclass(frozen=True, slots=True)
class Fractional(Atom):
    """A number with a fraction, which no backend tells from one without."""

    refusal: Refusal


@_hashed_once
@dataclass(frozen=True, slots=True)
class Bound(Atom):
    """A number on one side of another."""

    value: Fraction
    upper: bool
    exclusive: bool


@_hashed_once
@dataclass(frozen=True, slots=True)
class MultipleOf(Atom):
    """A number that is a whole multiple of another."""

    value: Fraction
    at: str = field(compare=False, default="")


@_hashed_once
@dataclass(frozen=True, slots=True)
class Length(Atom):
    """A string of so many characters."""

    low: int
    high: int | None


@_hashed_once
@dataclass(frozen=True, slots=True)
class Pattern(Atom):
    """A string of a regular language."""

    node: Node
    at: str = field(compare=False, default="")


@_hashed_once
@dataclass(frozen=True, slots=True)
class Prefix(Atom):
    """The item at an index, where there is one."""

    index: int
    formula: Formula
    seen: bool = True


@_hashed_once
@dataclass(frozen=True, slots=True)
class Items(Atom):
    """All items from an index on."""

    start: int
    formula: Formula
    seen: bool = True


@_hashed_once
@dataclass(frozen=True, slots=True)
class Count(Atom):
    """So many items."""

    low: int
    high: int | None


@_hashed_once
@dataclass(frozen=True, slots=True)
class Contains(Atom):
    """So many items, from an index on, are of a kind."""

    formula: Formula
    low: int
    high: int | None
    start: int = 0
    at: str = field(compare=False, default="")
    seen: bool = True


@_hashed_once
@dataclass(frozen=True, slots=True)
class Unique(Atom):
    """No two items are equal."""

    at: str = field(compare=False, default="")


@_hashed_once
@dataclass(frozen=True, slots=True)
class Property(Atom):
    """The value under a key, where there is one."""

    name: str
    formula: Formula
    seen: bool = True


@_hashed_once
@dataclass(frozen=True, slots=True)
class KeyPattern(Atom):
    """The values under all keys of a language."""

    node: Node
    formula: Formula
    seen: bool = True
    at: str = field(compare=False, default="")


@_hashed_once
@dataclass(frozen=True, slots=True)
class Additional(Atom):
    """The values under all keys but those named or matched."""

    names: frozenset[str]
    patterns: frozenset[Node]
    formula: Formula
    seen: bool = True


@_hashed_once
@dataclass(frozen=True, slots=True)
class Required(Atom):
    """A key that is there."""

    name: str


@_hashed_once
@dataclass(frozen=True, slots=True)
class Names(Atom):
    """Every key, read as a string."""

    formula: Formula
    at: str = field(compare=False, default="")


@_hashed_once
@dataclass(frozen=True, slots=True)
class Size(Atom):
    """So many keys."""

    low: int
    high: int | None
    at: str = field(compare=False, default="")


@_hashed_once
@dataclass(frozen=True, slots=True)
class Exists(Atom):
    """Some key, in `inside` if given and not among the names and patterns, has such a value.

    `named`: the key itself fulfils this formula.
    """

    names: frozenset[str]
    patterns: frozenset[Node]
    formula: Formula
    refusal: Refusal
    inside: Node | None = None
    named: Formula = TRUE


Branch = tuple[Atom, ...]
Alternatives = list[Branch]


def values_of(atom: Values | NotValues) -> list[Any]:
    """The values behind the identities."""
    import json

    return [json.loads(text) for text in atom.values]
