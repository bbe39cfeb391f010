"""Conjunction and union of alternatives, bounded."""

from __future__ import annotations

import dataclasses
import itertools

from plait.structured.schema.atoms import Alternatives, Atom, Branch

ALWAYS: Alternatives = [()]
NEITHER: Alternatives = []


class TooManyBranches(Exception):
    """A schema unfolds into more alternatives than it may."""


def conjunction(groups: list[Alternatives], limit: int) -> Alternatives:
    """Branches that fulfil one branch of each group."""
    found: Alternatives = [()]
    for group in sorted(groups, key=len) if len(groups) > 8 else groups:
        if group == ALWAYS:
            continue
        if len(found) * len(group) > limit * 8:
            raise TooManyBranches
        found = union([[joined(one, other) for one in found for other in group]], limit)
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
