"""Where a schema contradicts itself that no document fulfils."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plait.platform.errors import PlaitError
from plait.structured.schema.limits import unescape
from plait.structured.schema.refusal import Undecidable

if TYPE_CHECKING:
    from plait.structured.schema.reading import Reader

_MOST_LOOKED_AT = 256  # schemas, for a message


def contradiction(reader: Reader) -> str:
    """The pointer of the innermost schema that nothing fulfils, and that all must."""
    document, found, num_seen = reader.document, "", 0
    seen: set[str] = set()
    waiting = [""]
    while waiting and num_seen < _MOST_LOOKED_AT:
        at, num_seen = waiting.pop(0), num_seen + 1
        schema = document.at(at)
        if at in seen or not _is_barren(reader, at):
            continue
        seen.add(at)
        found = at
        waiting = [inner for inner, _ in document.inner(at) if _is_needed(schema, at, inner)]
    return found


def _is_barren(reader: Reader, at: str) -> bool:
    try:
        return reader.is_empty(reader.formula(at))
    except (Undecidable, PlaitError, RecursionError):
        return False  # it is refused elsewhere, in its own words


def _is_needed(schema: Any, at: str, inner: str) -> bool:
    """Whether whatever fulfils the schema at `at` fulfils that at `inner`, or has it inside."""
    keyword, _, name = inner[len(at) + 1 :].partition("/")
    if keyword == "properties":
        required = schema.get("required")
        return isinstance(required, list) and unescape(name) in required
    if keyword in ("items", "prefixItems"):
        least = schema.get("minItems")
        return isinstance(least, int | float) and least > int(name or 0)
    return keyword in ("allOf", "contains")
