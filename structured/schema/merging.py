"""Branches of atoms merged into shapes. A branch without a shape is surely empty."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from plait.structured.schema import lists, maps
from plait.structured.schema.atoms import (
    NEVER,
    Bound,
    Branch,
    Formula,
    Fractional,
    Integer,
    Length,
    MultipleOf,
    NotValues,
    Pattern,
    Poison,
    Untold,
    Values,
    values_of,
)
from plait.structured.schema.branches import Circle
from plait.structured.schema.derive import disjoint, without
from plait.structured.schema.holding import all_hold
from plait.structured.schema.refusal import Refusal, Undecidable
from plait.structured.schema.shapes import Listed, Narrowed, Number, Refused, Shape, String

if TYPE_CHECKING:
    from plait.structured.schema.reading import Reader

_MAX_EXCLUDED_NUMBERS = 8
_MAX_REMAINDERS = 1_000
_MAX_DEPTH = 24  # of the search for contradictions; beyond, none is assumed


class Merger:
    """Merges branches, and remembers which formulas are empty."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._shapes: dict[tuple[Branch, str], list[Shape]] = {}
        self.of_objects: dict[Branch, list[Shape]] = {}
        self._dead: dict[tuple[Branch, str], bool] = {}
        self._empty: dict[Formula, bool] = {NEVER: True}
        self._open: set[Formula] = set()

    def shapes(self, branch: Branch, kind: str) -> list[Shape]:
        """The shapes of a branch of one type."""
        key = (branch, kind)
        found = self._shapes.get(key)
        if found is None:
            self._reader.spend(4 + len(branch))
            found = self._shapes[key] = self._merge(branch, kind)
        return found

    def is_dead(self, branch: Branch, kind: str) -> bool:
        """Whether surely no value fulfils a branch; often told without its shapes."""
        key = (branch, kind)
        dead = self._dead.get(key)
        if dead is None:
            shapes = self._shapes.get(key)
            dead = self._find_dead(branch, kind) if shapes is None else not shapes
            self._dead[key] = dead
        return dead

    def _find_dead(self, branch: Branch, kind: str) -> bool:
        dead: bool | None = None
        if kind == "object":
            dead = maps.is_dead(self._reader, branch)
        elif kind == "array":
            dead = lists.is_dead(branch)
        if dead is None:
            return not self.shapes(branch, kind)
        self._reader.spend(1 + len(branch) // 4)
        return dead

    def is_empty(self, formula: Formula) -> bool:
        """Whether surely no value fulfils a formula."""
        known = self._empty.get(formula)
        if known is not None:
            return known
        if formula in self._open or len(self._open) > _MAX_DEPTH:
            return False
        self._open.add(formula)
        reader = self._reader
        try:
            empty = all(
                self.is_dead(branch, kind)
                for kind in reader.kinds.of_formula(formula)
                for branch in reader.branches(formula, kind)
            )
        except Circle:
            return False  # it is a part of what is being read
        finally:
            self._open.discard(formula)
        self._empty[formula] = empty
        return empty

    def all_shapes(self, formula: Formula) -> list[tuple[str, Shape]]:
        """The shapes of a formula with their types, each once."""
        found = dict.fromkeys(
            (kind, shape)
            for kind in self._reader.kinds.of_formula(formula)
            for branch in self._reader.branches(formula, kind)
            for shape in self.shapes(branch, kind)
        )
        return list(found)

    def _merge(self, branch: Branch, kind: str) -> list[Shape]:
        present = set(map(type, branch))
        if Values in present:
            return self._filtered(next(a for a in branch if isinstance(a, Values)), branch)
        if Untold in present:
            untold = next(atom for atom in branch if isinstance(atom, Untold))
            rest = tuple(atom for atom in branch if not isinstance(atom, Untold))
            return [Narrowed(untold.refusal)] if self.shapes(rest, kind) else []
        if Poison in present:
            poison = next(atom for atom in branch if isinstance(atom, Poison))
            rest = tuple(atom for atom in branch if not isinstance(atom, Poison))
            return [Refused(poison.refusal)] if self._of_kind(rest, kind) else []
        return self._of_kind(branch, kind)

    def _of_kind(self, branch: Branch, kind: str) -> list[Shape]:
        if kind in ("null", "boolean"):
            excluded = {text for a in branch if isinstance(a, NotValues) for text in a.values}
            every = ("null",) if kind == "null" else ("false", "true")
            left = tuple(text for text in every if text not in excluded)
            return [Listed(left)] if left else []
        if kind == "number":
            return _numbers(branch)
        if kind == "string":
            return _strings(branch)
        if kind == "array":
            return lists.shapes(self._reader, branch)
        return maps.shapes(self._reader, branch)

    def _filtered(self, listed: Values, branch: Branch) -> list[Shape]:
        kept, refused = [], None
        for text, value in zip(listed.values, values_of(listed), strict=True):
            try:
                if all_hold(self._reader, branch, value):
                    kept.append(text)
            except Undecidable as unknown:
                refused = Refused(unknown.refusal)
        if refused:
            return [refused]
        return [Listed(tuple(kept))] if kept else []


def _numbers(branch: Branch) -> list[Shape]:
    excluded = [v for a in branch if isinstance(a, NotValues) for v in values_of(a)]
    if refusal := _too_many_digits(branch):
        return [Refused(refusal)]
    if len(excluded) > _MAX_EXCLUDED_NUMBERS:
        why = f"more than {_MAX_EXCLUDED_NUMBERS} numbers are excluded one by one"
        return [Refused(Refusal("", "not", why, "list what is allowed", denial=True))]
    found = [_number(branch)]
    fractional = next((atom for atom in branch if isinstance(atom, Fractional)), None)
    if fractional and found[0]:
        return [] if found[0].integer else [Refused(fractional.refusal)]
    for value in sorted(excluded):
        point = Fraction(str(value))
        sides = [(Bound(point, upper, True),) for upper in (True, False)]
        found = [_narrowed(n, side) for n in found if n for side in sides]
    return [_listed_if_one(n) for n in dict.fromkeys(found) if n]


def _too_many_digits(branch: Branch) -> Refusal | None:
    """Multiples are told by an automaton with a state for each remainder."""
    number = _number(branch)
    multiple = number.multiple if number else None
    while multiple and multiple.denominator > 1:
        multiple *= 10
    if multiple is None or multiple <= _MAX_REMAINDERS:
        return None
    at = next(atom.at for atom in branch if isinstance(atom, MultipleOf))
    why = f"a grammar tells no more than {_MAX_REMAINDERS} remainders apart"
    return Refusal(at, "multipleOf", why, "use a divisor of fewer digits, or leave it out")


def _listed_if_one(number: Number) -> Shape:
    if number.low is not None and number.low == number.high:
        value = number.low
        return Listed((str(int(value)) if value.denominator == 1 else repr(float(value)),))
    return number


def _narrowed(number: Number, more: Branch) -> Number | None:
    atoms: list[object] = [Integer()] if number.integer else []
    if number.low is not None:
        atoms.append(Bound(number.low, False, number.low_exclusive))
    if number.high is not None:
        atoms.append(Bound(number.high, True, number.high_exclusive))
    if number.multiple is not None:
        atoms.append(MultipleOf(number.multiple))
    return _number((*atoms, *more))  # type: ignore[arg-type]


def _number(branch: Branch) -> Number | None:
    integer = any(isinstance(atom, Integer) for atom in branch)
    multiple: Fraction | None = None
    for atom in branch:
        if isinstance(atom, MultipleOf):
            multiple = _lcm(multiple, atom.value) if multiple else atom.value
    if integer and multiple:
        multiple = _lcm(multiple, Fraction(1))
    if multiple and multiple.denominator == 1:
        integer, multiple = True, multiple if multiple != 1 else None
    low, low_exclusive = _tightest(branch, upper=False)
    high, high_exclusive = _tightest(branch, upper=True)
    step = multiple or (Fraction(1) if integer else None)
    if step:
        low = low if low is None else step * _whole_above(low / step, exclusive=low_exclusive)
        high = (
            high if high is None else -step * _whole_above(-high / step, exclusive=high_exclusive)
        )
        low_exclusive = high_exclusive = False
    empty_if_equal = low_exclusive or high_exclusive
    if low is not None and high is not None and (low > high or (low == high and empty_if_equal)):
        return None
    return Number(
        integer=integer,
        low=low,
        low_exclusive=low_exclusive,
        high=high,
        high_exclusive=high_exclusive,
        multiple=multiple,
    )


def _tightest(branch: Branch, *, upper: bool) -> tuple[Fraction | None, bool]:
    bounds = [a for a in branch if isinstance(a, Bound) and a.upper == upper]
    if not bounds:
        return None, False
    sign = -1 if upper else 1
    best = max(bounds, key=lambda bound: (sign * bound.value, bound.exclusive))
    return best.value, best.exclusive


def _whole_above(value: Fraction, *, exclusive: bool) -> int:
    whole = math.ceil(value)
    return whole + 1 if exclusive and whole == value else whole


def _lcm(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(
        math.lcm(one.numerator * other.denominator, other.numerator * one.denominator),
        one.denominator * other.denominator,
    )


def _strings(branch: Branch) -> list[Shape]:
    low, high = 0, None
    patterns = dict.fromkeys(a.node for a in branch if isinstance(a, Pattern))
    for atom in branch:
        if isinstance(atom, Length):
            low = max(low, atom.low)
            high = (
                atom.high if high is None else min(high, high if atom.high is None else atom.high)
            )
        elif isinstance(atom, NotValues):
            patterns[without(str(v) for v in values_of(atom))] = None
    if high is not None and low > high:
        return []
    nodes = tuple(patterns)
    if any(disjoint(p, q) for i, p in enumerate(nodes) for q in nodes[:i]):
        return []
    return [String(low=low, high=high, patterns=nodes)]
