"""Conjunction and union of alternatives, bounded."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

from plait.platform.errors import InvalidSchema
from plait.structured.schema.atoms import Alternatives, Atom, Branch

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
    found: Alternatives = [()]
    for group in groups:
        if group == ALWAYS:
            continue
        if len(found) * len(group) > limit * 8:
            raise TooManyBranches
        pairs = [joined(one, other) for one in found for other in group]
        found = union([prune(pairs) if prune and len(pairs) > _MANY else pairs], limit)
        if not found:
            break
    return found


def union(groups: list[Alternatives], limit: int) -> Alternatives:
    """The branches of all groups, each once; one that says nothing stands for all."""
    found = dict.fromkeys(itertools.chain.from_iterable(groups))
    if () in found:
        return [()]
    if len(found) > limit:
        raise TooManyBranches
    return list(found)


def joined(one: Branch, other: Branch) -> Branch:
    """All atoms of two branches, each once, in their order."""
    return one + tuple(atom for atom in other if atom not in one) if one and other else one or other


def unseen(alternatives: Alternatives) -> Alternatives:
    """The same, for `unevaluated…` as if never looked at: denied schemas evaluate nothing."""
    return [tuple(map(_unseen, branch)) for branch in alternatives]


def _unseen(atom: Atom) -> Atom:
    if getattr(atom, "seen", False):
        return dataclasses.replace(atom, seen=False)  # type: ignore[call-arg]
    return atom
