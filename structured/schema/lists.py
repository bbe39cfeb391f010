"""Branches of lists merged into shapes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import TYPE_CHECKING

from plait.structured.schema.atoms import (
    NEVER,
    TRUE,
    Atom,
    Branch,
    Contains,
    Count,
    Formula,
    Items,
    NotValues,
    Poison,
    Prefix,
    Unique,
    Untold,
)
from plait.structured.schema.branches import joined
from plait.structured.schema.refusal import Refusal
from plait.structured.schema.shapes import Array, Listed, Narrowed, Refused, Shape

if TYPE_CHECKING:
    from plait.structured.schema.reading import Reader

_MAX_ARRANGEMENTS = 128  # where they are all there are
_MAX_FIRST = 16  # where there is no end of them: those among the first items
_WINDOW = 8  # first items among which those of a kind are looked for
_MAX_DISTINCT = 5  # values of which all lists without repetition, 326 of them, are written out


def shapes(reader: Reader, branch: Branch) -> list[Shape]:
    """The shapes of a branch of lists."""
    present = set(map(type, branch))
    excluded = []
    if NotValues in present:
        excluded = [text for a in branch if isinstance(a, NotValues) for text in a.values]
    if any(text != "[]" for text in excluded):
        return [_refused("", "not", "lists other than [] cannot be excluded")]
    if excluded:
        branch = joined(branch, (Count(1, None),))
    if Contains in present:
        contains = next(a for a in branch if isinstance(a, Contains))
        rest = tuple(atom for atom in branch if atom != contains)
        return _containing(reader, rest, contains)
    shape = _merged(reader, branch)
    if shape is None:
        return []
    unique = next((a for a in branch if isinstance(a, Unique)), None) if Unique in present else None
    return _distinct(reader, shape, unique) if unique else [shape]


_EMPTY_FITS = (Prefix, Items, Unique, Poison, Untold)


def is_dead(branch: Branch) -> bool | None:
    """Whether `shapes` of a branch are none, where no item is asked for: the list [] is left."""
    for atom in branch:
        if isinstance(atom, Count):
            if atom.low > 0:
                return None
        elif not isinstance(atom, _EMPTY_FITS):
            return None
    return False


def _merged(reader: Reader, branch: Branch) -> Array | None:
    low, high = 0, None
    length = 0
    for atom in branch:
        if isinstance(atom, Count):
            low = max(low, atom.low)
            high = (
                atom.high if high is None else min(high, high if atom.high is None else atom.high)
            )
        elif isinstance(atom, Prefix):
            length = max(length, atom.index + 1)
        elif isinstance(atom, Items):
            length = max(length, atom.start)
    prefix = [_at(reader, branch, i) for i in range(length)]
    rest = reader.both(*(a.formula for a in branch if isinstance(a, Items)))
    for i, formula in enumerate([*prefix, rest]):
        if (high is None or i < high) and reader.is_empty(formula):
            high = i
    if high is not None:
        prefix = prefix[:high]
        rest = NEVER if high <= length else rest
    if high is not None and low > high:
        return None
    return Array(prefix=tuple(prefix), rest=rest, low=low, high=high)


def _at(reader: Reader, branch: Branch, index: int) -> Formula:
    return reader.both(
        *(
            atom.formula
            for atom in branch
            if (isinstance(atom, Prefix) and atom.index == index)
            or (isinstance(atom, Items) and atom.start <= index)
        )
    )


def _containing(reader: Reader, branch: Branch, atom: Contains) -> list[Shape]:
    simple = _simple(reader, atom)
    if simple is not None:
        return [shape for more in simple for shape in shapes(reader, joined(branch, more))]
    frame = _merged(reader, tuple(a for a in branch if not isinstance(a, Contains | Unique)))
    if frame is None:
        return []
    if not frame.prefix and reader.is_empty(reader.both(frame.rest, reader.denied(atom.formula))):
        # All items are of the kind anyway.
        low = atom.start + atom.low if atom.low else 0
        high = None if atom.high is None else atom.start + atom.high
        return shapes(reader, joined(branch, (Count(low, high),)))
    options, exact = _arrangements(reader, frame, atom)
    found = [shape for more in options for shape in shapes(reader, joined(branch, more))]
    if not exact:
        why = f"items of the kind are held to come among the first {_WINDOW} only"
        instead = "bound the list by 'maxItems', or hold all its items to the kind by 'items'"
        found.append(Narrowed(Refusal(atom.at, "contains", why, instead)))
    return found


def _simple(reader: Reader, atom: Contains) -> list[Branch] | None:
    if atom.low <= 0 and atom.high is None:
        return [()]
    if reader.is_empty(atom.formula):
        return [] if atom.low > 0 else [()]
    if atom.formula == TRUE:
        low = atom.start + atom.low if atom.low else 0
        return [(Count(low, None if atom.high is None else atom.start + atom.high),)]
    if atom.high is not None and atom.low > atom.high:
        return []
    if atom.high == 0:
        return [(Items(atom.start, reader.denied(atom.formula), seen=False),)]
    return None


def _arrangements(reader: Reader, frame: Array, atom: Contains) -> tuple[list[Branch], bool]:
    """Ways to place the items of the kind, and whether these are all there are."""
    end = frame.high
    if end is None and reader.is_empty(reader.both(frame.rest, atom.formula)):
        end = len(frame.prefix)
    counts = range(atom.low, (atom.low if atom.high is None else atom.high) + 1)
    if end is not None:
        places = range(atom.start, max(atom.start, end))
        if _num_ways(len(places), counts) <= _MAX_ARRANGEMENTS:
            return _placed(reader, atom, places, counts), True
    num_places = max(_WINDOW, atom.low)
    while num_places > atom.low and _num_ways(num_places, counts) > _MAX_FIRST:
        num_places -= 1
    places = range(atom.start, atom.start + num_places)
    counts = range(atom.low, min(counts.stop, num_places + 1))
    return _placed(reader, atom, places, counts), False


def _num_ways(num_places: int, counts: range) -> int:
    return sum(math.comb(num_places, count) for count in counts)


def _placed(reader: Reader, atom: Contains, places: range, counts: range) -> list[Branch]:
    """A branch for each choice of places; beside them are no others of the kind if they count."""
    found: list[Branch] = []
    for count in counts:
        for chosen in itertools.combinations(places, count):
            end = chosen[-1] + 1 if chosen else atom.start
            kinds: list[Atom] = [Prefix(i, atom.formula, seen=False) for i in chosen]
            if atom.high is not None:
                other = reader.denied(atom.formula)
                between = [i for i in range(atom.start, end) if i not in chosen]
                kinds += [Prefix(i, other, seen=False) for i in between]
                kinds.append(Items(end, other, seen=False))
            found.append((Count(end if chosen else 0, None), *kinds))
    return found


def _distinct(reader: Reader, shape: Array, atom: Unique) -> list[Shape]:
    """Lists of a few values are written out; of all others the items are compared later."""
    if shape.high is not None and shape.high <= 1:
        return [shape]
    values = _finite(reader, shape.rest) if not shape.prefix else None
    if values is not None:
        high = len(values) if shape.high is None else min(shape.high, len(values))
        if shape.low > high:
            return []
        if len(values) <= _MAX_DISTINCT:
            return [_permuted(reader, values, range(shape.low, high + 1))]
    return [dataclasses.replace(shape, unique=True, at=atom.at)]


def _permuted(reader: Reader, values: list[str], sizes: range) -> Listed:
    found = [
        reader.keep([json.loads(text) for text in chosen])
        for size in sizes
        for chosen in itertools.permutations(values, size)
    ]
    return Listed(tuple(found))


def _finite(reader: Reader, formula: Formula) -> list[str] | None:
    found: dict[str, None] = {}
    for _, shape in reader.merger.all_shapes(formula):
        if not isinstance(shape, Listed):
            return None
        found |= dict.fromkeys(shape.values)
    return list(found)


def _refused(at: str, keyword: str, why: str, instead: str = "list what is allowed") -> Refused:
    return Refused(Refusal(at, keyword, why, instead, denial=True))
