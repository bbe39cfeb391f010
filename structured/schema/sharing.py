"""Places of a schema that say the same, so that each is read and written once."""

from __future__ import annotations

from typing import Any

from plait.platform.errors import InvalidSchema
from plait.structured.schema import keywords
from plait.structured.schema.combining import APPLYING
from plait.structured.schema.document import Document
from plait.structured.schema.refusal import Undecidable
from plait.structured.schema.values import TYPES

# All that a reader gives a meaning to, but for what has one beside these only.
ASSERTING = (
    keywords.NAMES
    | APPLYING
    | {"type", "nullable", "enum", "const", "unevaluatedProperties", "unevaluatedItems"}
)
# Not objects: one that is open is named by its own place where that is refused.
_SHARED = frozenset({*TYPES, "integer"}) - {"object"}


class Sharing:
    """Where in one document a schema stands first: behind references, or said already."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._first: dict[str, str] = {}  # by the type that is all it says; "": by saying nothing

    def place(self, pointer: str) -> str:
        """The pointer of a schema that means what the schema at `pointer` does."""
        passed = {pointer}
        while isinstance(schema := self._document.at(pointer), dict):
            asserting = [key for key in schema if key in ASSERTING]
            if asserting == ["$ref"] or (self._document.legacy and "$ref" in schema):
                target = self._target(pointer, schema["$ref"])
                if target is None or target in passed:
                    return pointer
                passed.add(target)
                pointer = target
            elif not asserting:
                return self._first.setdefault("", pointer)
            elif asserting == ["type"] and _is_shared(schema["type"]):
                return self._first.setdefault(schema["type"], pointer)
            else:
                break
        return pointer

    def _target(self, pointer: str, ref: Any) -> str | None:
        """None where a reference leads nowhere, which its reader will tell."""
        if not isinstance(ref, str):
            return None
        try:
            return self._document.resolve(pointer, "$ref", ref)
        except (Undecidable, InvalidSchema):
            return None


def _is_shared(named: Any) -> bool:
    return isinstance(named, str) and named in _SHARED
