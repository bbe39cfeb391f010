"""Which JSON types a schema names: what rules most of them out before anything else is read."""

from __future__ import annotations

from collections.abc import Collection

from plait.structured.schema.atoms import NEVER, Formula
from plait.structured.schema.document import Document
from plait.structured.schema.refusal import Undecidable
from plait.structured.schema.values import TYPES, type_of


class Kinds:
    """The types named in one document, as far as they are named or listed at once."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._named: dict[str, Collection[str]] = {}
        self._of_formulas: dict[Formula, tuple[str, ...]] = {}

    def of_formula(self, formula: Formula) -> tuple[str, ...]:
        """The types that values of a formula may have."""
        found = self._of_formulas.get(formula)
        if found is None:
            found = self._of_formulas[formula] = self._common(formula)
        return found

    def _common(self, formula: Formula) -> tuple[str, ...]:
        found: tuple[str, ...] = () if formula == NEVER else TYPES
        for pointer, positive in formula if found else ():
            named = self.of(pointer) if positive else TYPES
            if named != TYPES:
                found = tuple(kind for kind in found if kind in named)
        return found

    def of(self, pointer: str) -> Collection[str]:
        """The types that the schema at a pointer names; all where it names none."""
        found = self._named.get(pointer)
        if found is None:
            self._named[pointer] = TYPES  # a circle of references rules nothing out
            found = self._named[pointer] = self._find(pointer)
        return found

    def _find(self, pointer: str) -> Collection[str]:
        schema = self._document.at(pointer)
        if not isinstance(schema, dict):
            return TYPES
        if self._document.is_reference(schema):
            return self._behind(pointer, schema["$ref"])
        named = schema.get("type")
        if isinstance(named, str) and schema.get("nullable") is not True:
            named = "number" if named == "integer" else named
            return (named,) if named in TYPES else TYPES
        if "type" in schema:
            return TYPES
        if "const" in schema:
            return (type_of(schema["const"]),)
        enum = schema.get("enum")
        return frozenset(map(type_of, enum)) if isinstance(enum, list) else TYPES

    def _behind(self, pointer: str, ref: str) -> Collection[str]:
        try:
            target = self._document.resolve(pointer, "$ref", ref)
        except Undecidable:
            return TYPES
        return self.of(target)
