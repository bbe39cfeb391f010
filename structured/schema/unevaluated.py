"""`unevaluatedProperties` and `unevaluatedItems`: what is left by all that a branch looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.structured.schema.atoms import (
    NEVER,
    TRUE,
    Additional,
    Alternatives,
    Branch,
    Contains,
    Exists,
    Formula,
    Items,
    KeyPattern,
    Poison,
    Prefix,
    Property,
)
from plait.structured.schema.branches import joined
from plait.structured.schema.refusal import Refusal

if TYPE_CHECKING:
    from typing import Any

    from plait.structured.schema.reading import Reader


def keyword_of(schema: dict[str, Any], kind: str) -> str | None:
    """The keyword of this kind in a schema, if any."""
    keyword = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}.get(kind)
    return keyword if keyword in schema else None


def affirmed(reader: Reader, at: str, keyword: str, found: Alternatives) -> Alternatives:
    """Branches in which all that is left fulfils the keyword's schema."""
    formula = reader.formula(f"{at}/{keyword}")
    add = _rest_of_keys if keyword == "unevaluatedProperties" else _rest_of_items
    return [joined(branch, add(branch, formula, f"{at}/{keyword}")) for branch in found]


def denied(reader: Reader, at: str, keyword: str, found: Alternatives) -> Alternatives:
    """Branches in which something is left that does not fulfil the keyword's schema."""
    formula = reader.denied(reader.formula(f"{at}/{keyword}"))
    if formula == NEVER:
        return []
    refusal = _refusal(f"{at}/{keyword}", keyword, "its denial cannot be written", denial=True)
    result: Alternatives = []
    for branch in found:
        if keyword == "unevaluatedItems":
            result.append(joined(branch, (Poison(refusal),)))
        elif (left := _left_of_keys(branch)) is not None:
            result.append(joined(branch, (Exists(*left, formula, refusal),)))
    return result


def _left_of_keys(branch: Branch) -> tuple[frozenset[str], frozenset[Any]] | None:
    if any(isinstance(atom, Additional) and atom.seen for atom in branch):
        return None
    names = frozenset(a.name for a in branch if isinstance(a, Property) and a.seen)
    return names, frozenset(a.node for a in branch if isinstance(a, KeyPattern) and a.seen)


def _rest_of_keys(branch: Branch, formula: Formula, _: str) -> Branch:
    left = _left_of_keys(branch)
    return () if left is None else (Additional(*left, formula),)


def _rest_of_items(branch: Branch, formula: Formula, at: str) -> Branch:
    if any(isinstance(atom, Items) and atom.seen for atom in branch):
        return ()
    start = max((a.index + 1 for a in branch if isinstance(a, Prefix) and a.seen), default=0)
    found = {a.formula for a in branch if isinstance(a, Contains) and a.seen}
    if not found or formula == TRUE:
        return (Items(start, formula),)
    if len(found) == 1 and formula == NEVER:
        # What `contains` found counts as evaluated: the rest must be of its kind.
        return (Items(start, found.pop()),)
    why = "together with 'contains' it asks for one of two schemas"
    return (Poison(_refusal(at, "unevaluatedItems", why)),)


def _refusal(at: str, keyword: str, why: str, *, denial: bool = False) -> Refusal:
    instead = "close the object or the list by 'additionalProperties' or 'items'"
    return Refusal(at, keyword, why, instead, denial)
