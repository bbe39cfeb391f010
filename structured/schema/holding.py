"""Whether one value fulfils an atom: so lists of values are filtered by what stands beside."""

# ruff: noqa: ARG001 - one signature for all atoms

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING, Any

from plait.structured.schema import atoms
from plait.structured.schema.atoms import TRUE, Alternatives, Atom
from plait.structured.schema.derive import matches
from plait.structured.schema.refusal import Undecidable
from plait.structured.schema.values import exact, identity, is_integer

if TYPE_CHECKING:
    from plait.structured.schema.reading import Reader


def any_holds(reader: Reader, alternatives: Alternatives, value: Any) -> bool:
    """Whether a value fulfils one branch. Raises `Undecidable` where only a refusal could tell."""
    unknown: Undecidable | None = None
    for branch in alternatives:
        try:
            if all_hold(reader, branch, value):
                return True
        except Undecidable as error:
            unknown = error
    if unknown:
        raise unknown
    return False


def all_hold(reader: Reader, branch: tuple[Atom, ...], value: Any) -> bool:
    """Whether a value fulfils all atoms; one that fails decides, whatever is unknown beside it."""
    unknown: Undecidable | None = None
    for atom in branch:
        try:
            if not holds(atom, reader, value):
                return False
        except Undecidable as error:
            unknown = error
    if unknown:
        raise unknown
    return True


@singledispatch
def holds(atom: Atom, reader: Reader, value: Any) -> bool:
    """Whether a value of the atom's type fulfils it."""
    raise AssertionError(f"an atom without meaning: {atom}")


@holds.register(atoms.Values)
def _(atom: atoms.Values, reader: Reader, value: Any) -> bool:
    return identity(value) in atom.values


@holds.register(atoms.NotValues)
def _(atom: atoms.NotValues, reader: Reader, value: Any) -> bool:
    return identity(value) not in atom.values


@holds.register(atoms.Poison)
def _(atom: atoms.Poison, reader: Reader, value: Any) -> bool:
    raise Undecidable(atom.refusal)


@holds.register(atoms.Untold)
def _(atom: atoms.Untold, reader: Reader, value: Any) -> bool:
    if not atom.whole:
        raise Undecidable(atom.refusal)
    return True


@holds.register(atoms.Integer)
def _(atom: atoms.Integer, reader: Reader, value: Any) -> bool:
    return is_integer(value)


@holds.register(atoms.Fractional)
def _(atom: atoms.Fractional, reader: Reader, value: Any) -> bool:
    return not is_integer(value)


@holds.register(atoms.Bound)
def _(atom: atoms.Bound, reader: Reader, value: Any) -> bool:
    number = exact(value)
    if number == atom.value:
        return not atom.exclusive
    return (number < atom.value) == atom.upper


@holds.register(atoms.MultipleOf)
def _(atom: atoms.MultipleOf, reader: Reader, value: Any) -> bool:
    return (exact(value) / atom.value).denominator == 1


@holds.register(atoms.Length)
def _(atom: atoms.Length, reader: Reader, value: Any) -> bool:
    return atom.low <= len(value) and (atom.high is None or len(value) <= atom.high)


@holds.register(atoms.Pattern)
def _(atom: atoms.Pattern, reader: Reader, value: Any) -> bool:
    return matches(atom.node, value)


@holds.register(atoms.Prefix)
def _(atom: atoms.Prefix, reader: Reader, value: Any) -> bool:
    return len(value) <= atom.index or reader.holds(atom.formula, value[atom.index])


@holds.register(atoms.Items)
def _(atom: atoms.Items, reader: Reader, value: Any) -> bool:
    return all(reader.holds(atom.formula, item) for item in value[atom.start :])


@holds.register(atoms.Count)
def _(atom: atoms.Count, reader: Reader, value: Any) -> bool:
    return atom.low <= len(value) and (atom.high is None or len(value) <= atom.high)


@holds.register(atoms.Contains)
def _(atom: atoms.Contains, reader: Reader, value: Any) -> bool:
    number = sum(reader.holds(atom.formula, item) for item in value[atom.start :])
    return atom.low <= number and (atom.high is None or number <= atom.high)


@holds.register(atoms.Unique)
def _(atom: atoms.Unique, reader: Reader, value: Any) -> bool:
    return len(set(map(identity, value))) == len(value)


@holds.register(atoms.Property)
def _(atom: atoms.Property, reader: Reader, value: Any) -> bool:
    return atom.name not in value or reader.holds(atom.formula, value[atom.name])


@holds.register(atoms.KeyPattern)
def _(atom: atoms.KeyPattern, reader: Reader, value: Any) -> bool:
    chosen = [key for key in value if matches(atom.node, key)]
    return all(reader.holds(atom.formula, value[key]) for key in chosen)


@holds.register(atoms.Additional)
def _(atom: atoms.Additional, reader: Reader, value: Any) -> bool:
    chosen = [key for key in value if is_left(key, atom)]
    return all(reader.holds(atom.formula, value[key]) for key in chosen)


@holds.register(atoms.Required)
def _(atom: atoms.Required, reader: Reader, value: Any) -> bool:
    return atom.name in value


@holds.register(atoms.Names)
def _(atom: atoms.Names, reader: Reader, value: Any) -> bool:
    return all(reader.holds(atom.formula, key) for key in value)


@holds.register(atoms.Size)
def _(atom: atoms.Size, reader: Reader, value: Any) -> bool:
    return atom.low <= len(value) and (atom.high is None or len(value) <= atom.high)


@holds.register(atoms.Exists)
def _(atom: atoms.Exists, reader: Reader, value: Any) -> bool:
    return any(
        reader.holds(atom.formula, value[key])
        and (atom.named == TRUE or reader.holds(atom.named, key))
        for key in value
        if is_left(key, atom)
    )


def is_left(key: str, atom: atoms.Additional | atoms.Exists) -> bool:
    """Whether a key is neither named nor matched, and inside where that is asked."""
    if key in atom.names or any(matches(node, key) for node in atom.patterns):
        return False
    return not isinstance(atom, atoms.Exists) or not atom.inside or matches(atom.inside, key)
