"""Conjunction and union of alternatives, bounded."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from plait.platform.errors import InvalidSchema
from plait.structured.schema.atoms import (
    NEVER,
    Alternatives,
    Atom,
    Branch,
    Property,
    Required,
)

Prune = Callable[[Alternatives], Alternatives]
_MANY = 16

ALWAYS: Alternatives = [()]
NEITHER: Alternatives = []


class Circle(InvalidSchema):
    """A schema is asked for what it is while that is being found out.

    An error only where nothing but the schema itself stands between.
    """


class TooManyBranches(Exception):
    """A schema unfolds into more alternatives than it may."""


def conjunction(groups: list[Alternatives], limit: int, prune: Prune | None = None) -> Alternatives:
    """Branches that fulfil one branch of each group; of many, `prune` takes out the dead."""
    if all(len(group) == 1 for group in groups):  # the most there are, by far
        return [tuple(dict.fromkeys(itertools.chain.from_iterable(each for (each,) in groups)))]
    found: Alternatives = [()]
    for group in groups:
        if group == ALWAYS:
            continue
        if len(found) * len(group) > limit * 8:
            raise TooManyBranches
        pairs = group if found == ALWAYS else _pairs(found, group)
        found = union([prune(pairs) if prune and len(pairs) > _MANY else pairs], limit)
        if not found:
            break
    return found


def _pairs(some: Alternatives, others: Alternatives) -> Alternatives:
    """`joined` for each of both."""
    found: Alternatives = []
    for one in some:
        known = frozenset(one)
        found += [one + tuple(a for a in other if a not in known) for other in others]
    return found


def union(groups: list[Alternatives], limit: int) -> Alternatives:
    """The branches of all groups, each once; one that says nothing stands for all."""
    found = dict.fromkeys(itertools.chain.from_iterable(groups))
    if () in found:
        return [()]
    if len(found) > limit:
        raise TooManyBranches
    return list(found)


def absorbed(alternatives: Alternatives) -> Alternatives:
    """The same without branches that only say more than another does, shortest first."""
    kept: list[frozenset[Atom]] = []
    found: Alternatives = []
    for branch in sorted(alternatives, key=len):
        atoms = frozenset(branch)
        if not any(each <= atoms for each in kept):
            kept.append(atoms)
            found.append(branch)
    return found


def optional(alternatives: Alternatives) -> Alternatives:
    """The same, where a key that is absent, or there with some value, takes one branch."""
    absent = {_absent(branch) for branch in alternatives} - {None}
    found = dict.fromkeys(_loosened(branch, absent) for branch in alternatives)
    loose = {
        branch[0].name
        for branch in found
        if len(branch) == 1 and isinstance(branch[0], Property) and _absent(branch) is None
    }
    return [branch for branch in found if _absent(branch) not in loose]


def _absent(branch: Branch) -> str | None:
    """The key that must be absent, if that is all a branch says."""
    if len(branch) == 1 and isinstance(atom := branch[0], Property) and atom.formula == NEVER:
        return atom.name
    return None


def _loosened(branch: Branch, absent: set[str | None]) -> Branch:
    match branch:
        case (Required(name), Property() as value) if name == value.name and name in absent:
            return branch if value.formula == NEVER else (value,)
    return branch


def joined(one: Branch, other: Branch) -> Branch:
    """All atoms of two branches, each once, in their order."""
    if not (one and other):
        return one or other
    if len(one) == 1:
        first = one[0]
        return one + tuple(atom for atom in other if atom != first)
    known = frozenset(one)
    return one + tuple(atom for atom in other if atom not in known)


def unseen(alternatives: Alternatives) -> Alternatives:
    """The same, for `unevaluated…` as if never looked at: denied schemas evaluate nothing."""
    return [tuple(map(_unseen, branch)) for branch in alternatives]


def _unseen(atom: Atom) -> Atom:
    if getattr(atom, "seen", False):
        return dataclasses.replace(atom, seen=False)  # type: ignore[type-var]
    return atom
