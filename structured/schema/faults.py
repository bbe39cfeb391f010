"""What is refused at the sight of a keyword: other dialects, slips, what strict schemas lack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from plait.structured.schema.document import Document
from plait.structured.schema.limits import unescape
from plait.structured.schema.refusal import Refusal

Nodes = list[tuple[str, dict[str, Any]]]

_STANDARD = re.compile(r"https?://(www\.)?json-schema\.org/", re.IGNORECASE)
# Without a draft in its name it is the latest.
_SERVED = re.compile(r"draft-0[4-7]\b|draft/20(19-09|20-12)\b|org/(hyper-)?schema\b", re.IGNORECASE)
_OLDER = re.compile(r"draft-0?[0-3]\b", re.IGNORECASE)


def of_nodes(nodes: Nodes) -> Iterator[Refusal]:
    """In any schema."""
    for at, node in nodes:
        if "x-guidance" in node:
            why = "it could switch enforcement off"
            yield Refusal(f"{at}/x-guidance", "x-guidance", why, "leave it out")
        if isinstance(node.get("required"), bool):
            yield _required_by_draft_3(at)


_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_STRINGS = frozenset({"pattern", "format"})
_NUMBERS = frozenset({"minimum", "maximum", "multipleOf"})


def malformed(document: Document) -> tuple[str, str] | None:
    """Where a keyword's value is none that it can have, and why, be it of another type's.

    Readers meet the keywords of the types that a schema allows, and would not look at the rest.
    """
    for at, node in document.walk():
        if document.legacy and "$ref" in node:
            continue  # what stands beside it says nothing
        for keyword in node.keys() & (_COUNTS | _STRINGS | _NUMBERS):
            value, why = node[keyword], ""
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None:
                continue
            is_broken = isinstance(value, float) and not value.is_integer()
            if keyword in _COUNTS and (not is_number or is_broken or value < 0):
                why = "a whole number, 0 or more"
            elif keyword in _NUMBERS and not is_number:
                why = "a number"
            elif keyword in _STRINGS and not isinstance(value, str):
                why = "a string"
            if why:
                return f"{at}/{keyword}", f"{keyword!r} is {why}"
    return None


def foreign_dialects(nodes: Nodes) -> Iterator[Refusal]:
    """Drafts by which a schema would mean something else than is read here."""
    for at, node in nodes:
        dialect = node.get("$schema")
        if isinstance(dialect, str) and _is_foreign(dialect):
            why = f"the dialect {dialect!r} is not served"
            instead = "leave it out, or write the schema in draft 4 to 7, 2019-09 or 2020-12"
            yield Refusal(f"{at}/$schema", "$schema", why, instead)


def dialect_notes(nodes: Nodes) -> list[str]:
    """What is said of dialects by names that the standard does not know."""
    names = (node.get("$schema") for _, node in nodes)
    custom = {name for name in names if isinstance(name, str) and not _STANDARD.match(name)}
    return [f"'$schema': {name!r} is unknown, and read as 2020-12" for name in sorted(custom)]


def _is_foreign(dialect: str) -> bool:
    standard = _STANDARD.match(dialect) is not None
    return _OLDER.search(dialect) is not None or (standard and not _SERVED.search(dialect))


def _required_by_draft_3(at: str) -> Refusal:
    outer, _, key = at.rpartition("/")
    if outer.endswith("/properties"):
        place = outer.removesuffix("/properties") or "/"
        instead = (
            f"list {unescape(key)!r} in 'required' of the object at {place}, or leave it out there"
        )
    else:
        instead = "list the keys that must come"
    return Refusal(f"{at}/required", "required", "true and false are of draft 3", instead)


# --- strict ---


def open_object(at: str) -> Refusal:
    """Of an object that a strict schema leaves open."""
    return Refusal(
        f"{at}/additionalProperties",
        "additionalProperties",
        "a strict schema allows no keys beyond those it lists",
        "set 'additionalProperties': false here",
    )


# Schemas of the same value, and those that say nothing of what is written.
_BESIDE = ("allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas", "dependencies")
_UNWRITTEN = ("not", "if", "propertyNames")


def of_strict(document: Document) -> Iterator[Refusal]:
    """Objects that do not list all of their properties in `required`, as OpenAI demands.

    What the schemas around an object's part demand counts, as in `allOf`.
    """
    waiting: list[tuple[str, Any, frozenset[str]]] = [
        (at, document.at(at), frozenset()) for at in document.starts
    ]
    while waiting:
        at, schema, known = waiting.pop()
        if not isinstance(schema, dict):
            continue
        known |= _demanded(schema)
        properties = schema.get("properties")
        if isinstance(properties, dict):
            missing = [
                k for k, inner in properties.items() if k not in known and inner is not False
            ]
            if missing:
                yield _optional(at, missing)
        for place, inner in document.inner(at):
            keyword = place[len(at) + 1 :].partition("/")[0]
            if keyword not in _UNWRITTEN:
                waiting.append((place, inner, known if keyword in _BESIDE else frozenset()))


def _demanded(schema: dict[str, Any]) -> frozenset[str]:
    found = frozenset[str]()
    waiting: list[Any] = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        names, members = each.get("required"), each.get("allOf")
        if isinstance(names, list):
            found |= {name for name in names if isinstance(name, str)}
        waiting += members if isinstance(members, list) else []
    return found


def _optional(at: str, missing: list[str]) -> Refusal:
    some = ", ".join(map(repr, missing[:10])) + (", …" if len(missing) > 10 else "")
    why = f"a strict schema lists all properties of an object, and here {some} is not"
    instead = "list it too; where its value may be absent, allow 'null' beside its type"
    return Refusal(f"{at}/required", "required", why, instead)
