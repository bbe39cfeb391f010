"""What is left of a conjunction of atoms: one shape of values of one type.

Shapes are what can be written as a schema that both backends read alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from plait.structured.schema.atoms import Formula
from plait.structured.schema.refusal import Refusal
from plait.structured.schema.regex import Node


@dataclass(frozen=True, slots=True)
class Listed:
    """Some values, by their identities."""

    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """Numbers between bounds."""

    integer: bool = False
    low: Fraction | None = None
    low_exclusive: bool = False
    high: Fraction | None = None
    high_exclusive: bool = False
    multiple: Fraction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class String:
    """Strings of some length, in all the languages."""

    low: int = 0
    high: int | None = None
    patterns: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """Lists: the first items one by one, and the rest. `at`: where `unique` was written."""

    prefix: tuple[Formula, ...] = ()
    rest: Formula
    low: int = 0
    high: int | None = None
    unique: bool = False
    at: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """Objects: named keys in order, keys of disjoint languages, and the rest."""

    names: tuple[tuple[str, Formula], ...] = ()
    required: frozenset[str] = frozenset()
    patterns: tuple[tuple[Node, Formula], ...] = ()
    rest: Formula
    low: int = 0
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Values that may be valid but cannot be described."""

    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Valid values that the other shapes leave out, since they could be any number of shapes.

    It stands for them where emptiness is asked for; alone it is a refusal.
    """

    refusal: Refusal


Shape = Listed | Number | String | Array | Object | Refused | Narrowed
