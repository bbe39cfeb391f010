"""Shapes written as a schema of few keywords, whose meaning both backends share.

Each formula becomes one definition. Definitions used once are put in place; those that refer to
themselves, or are shared and long, stay under `$defs`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from plait.platform.errors import GrammarTooComplex, InvalidSchema
from plait.structured.schema.atoms import NEVER, TRUE, Formula
from plait.structured.schema.contradiction import contradiction
from plait.structured.schema.reading import Reader
from plait.structured.schema.refusal import Refusal, Undecidable
from plait.structured.schema.regex import anchored
from plait.structured.schema.shapes import (
    Array,
    Listed,
    Narrowed,
    Number,
    Object,
    Refused,
    Shape,
    String,
)
from plait.structured.schema.values import TYPES

_SHORT = 120  # bytes of a definition that is copied rather than referred to
_MEASURED = 32  # definitions at once
REFERENCE = "#/$defs/"
_DOUBLE_INT = 2**53  # to here each whole number is a double
_INT64 = Fraction(2**63 - 1024)  # the last double of 64 bits


# Where schemas lie inside a written schema.
_SINGLE = frozenset({"items", "additionalProperties"})
_LISTS = frozenset({"anyOf", "prefixItems"})
_MAPS = frozenset({"properties", "patternProperties", "$defs"})

_UNSAID = (Narrowed, Refused)
_WHOLE = Number(integer=True)
_EVERY: dict[str, Shape] = {
    "number": Number(),
    "string": String(),
    "array": Array(rest=TRUE),
    "object": Object(rest=TRUE),
}


class Writer:
    """Writes the formulas of one reader."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._names: dict[Formula, str] = {}
        self._written: dict[str, Any] = {}
        self._waiting: list[Formula] = []
        self._referred: list[str] = []  # by what is being written
        self._references: dict[str, list[str]] = {}  # by each definition
        self.text = ""  # what was written, as JSON
        self.refusals: dict[Refusal, None] = {}
        self.narrowed: dict[Refusal, None] = {}  # what is left out of what was written
        self.open_objects: dict[str, None] = {}  # pointers of objects that allow unnamed keys

    def write(self, formula: Formula) -> Any:
        """The schema of a formula. What cannot be written is in `refusals`, and left out."""
        if self._reader.is_empty(formula):
            self._no_document()
        root = self._refer(formula)
        self._references["root"] = self._referred
        size, fresh = 0, []
        while self._waiting:
            each = self._waiting.pop()
            name = self._names[each]
            self._references[name] = self._referred = []
            self._written[name] = body = self._define(each)
            fresh.append(body)
            if len(fresh) == _MEASURED or not self._waiting:
                size += len(json.dumps(fresh))
                fresh.clear()
                self._check_size(size)
        schemas = {"root": root, **self._written}
        barren = _barren(self._written)
        if not self.refusals and _leads_to(root, barren):
            if not self.narrowed:
                self._no_document()
            self.refusals |= self.narrowed
        references = self._references
        if barren:
            schemas = _pruned(schemas, barren)
            references = {name: _references(schema) for name, schema in schemas.items()}
        written = _assembled(schemas, references)
        self.text = json.dumps(written)
        if len(self.text) > self._reader.limits.max_written_bytes:
            self._check_size(1 << 60)
        return written

    def _check_size(self, size: int) -> None:
        limits = self._reader.limits
        if size > limits.max_written_bytes or len(self._written) > limits.max_definitions:
            raise GrammarTooComplex(
                "the schema unfolds into too large a grammar; use fewer combinations of anyOf, "
                "oneOf, not, if and allOf",
                param=self._reader.document.param,
            )

    def _no_document(self) -> None:
        at = contradiction(self._reader) or "/"
        raise InvalidSchema(
            f"no document fulfils the schema: what stands at {at} contradicts itself",
            param=self._reader.document.param,
        )

    def _refer(self, formula: Formula) -> Any:
        if formula == TRUE:
            return {}
        if self._reader.is_empty(formula):
            return False
        if formula not in self._names:
            self._names[formula] = f"d{len(self._names)}"
            self._waiting.append(formula)
        name = self._names[formula]
        self._referred.append(name)
        return {"$ref": REFERENCE + name}

    def _define(self, formula: Formula) -> Any:
        try:
            shapes = self._reader.merger.all_shapes(formula)
        except Undecidable as unknown:
            self.refusals[unknown.refusal] = None
            return False
        at = min((literal.pointer for literal in formula), key=len, default="")
        shapes = [(kind, _countable(shape)) for kind, shape in shapes]
        alone = all(isinstance(shape, _UNSAID) for _, shape in shapes)
        denies = not all(literal.positive for literal in formula)
        for _, shape in shapes:
            if isinstance(shape, Object) and shape.rest != NEVER:
                self.open_objects[at] = None
            if isinstance(shape, _UNSAID):
                found = shape.refusal.placed(at)
                harmless = isinstance(shape, Narrowed) or (denies and found.denial)
                (self.narrowed if harmless and not alone else self.refusals)[found] = None
        return _any_of([*self._plain(shapes)])

    def _plain(self, shapes: list[tuple[str, Shape]]) -> Iterator[dict[str, Any]]:
        free: dict[str, str] = {}
        for kind, shape in shapes:
            if (name := _bare(kind, shape)) and free.get(kind) != kind:
                free[kind] = name
        bare = [free[kind] for kind in TYPES if kind in free]
        if bare == list(TYPES):
            yield {}
            return
        listed = [
            text
            for kind, shape in shapes
            if isinstance(shape, Listed) and free.get(kind) != kind
            for text in shape.values
        ]
        if bare:
            yield {"type": bare[0] if len(bare) == 1 else bare}
        if listed:
            originals = self._reader.originals
            yield {
                "enum": [
                    originals[text] if text in originals else json.loads(text)
                    for text in dict.fromkeys(listed)
                ]
            }
        for kind, shape in shapes:
            if free.get(kind) == kind or isinstance(shape, (Listed, *_UNSAID)):
                continue
            if _bare(kind, shape) is None:
                yield self._shape(shape)

    def _shape(self, shape: Shape) -> dict[str, Any]:
        if isinstance(shape, Number):
            return _number(shape)
        if isinstance(shape, String):
            return _string(shape)
        if isinstance(shape, Array):
            return self._array(shape)
        assert isinstance(shape, Object), "all others are handled"
        return self._object(shape)

    def _array(self, shape: Array) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        if shape.prefix:
            schema["prefixItems"] = [self._refer(formula) for formula in shape.prefix]
        schema["items"] = self._refer(shape.rest)
        if shape.low:
            schema["minItems"] = shape.low
        if shape.high is not None and not (shape.rest == NEVER and shape.high == len(shape.prefix)):
            schema["maxItems"] = shape.high
        if shape.unique:
            schema["uniqueItems"] = shape.at  # which `uniqueness` takes out again
        return schema

    def _object(self, shape: Object) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"}
        if shape.names:
            schema["properties"] = {name: self._refer(f) for name, f in shape.names}
        if shape.required:
            schema["required"] = [name for name, _ in shape.names if name in shape.required]
        if shape.patterns:
            schema["patternProperties"] = {
                anchored(node): self._refer(formula) for node, formula in shape.patterns
            }
        schema["additionalProperties"] = self._refer(shape.rest)
        if shape.low:
            schema["minProperties"] = shape.low
        if shape.high is not None:
            schema["maxProperties"] = shape.high
        return schema


def _bare(kind: str, shape: Shape) -> str | None:
    """The name of a type of which the shape leaves nothing out."""
    if isinstance(shape, Listed):
        if shape.values == ("null",):
            return "null"
        return "boolean" if set(shape.values) == {"false", "true"} else None
    if shape == _WHOLE:
        return "integer"
    return kind if shape == _EVERY.get(kind) else None


def _number(shape: Number) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer" if shape.integer else "number"}
    for value, exclusive, name in (
        (shape.low, shape.low_exclusive, "Minimum"),
        (shape.high, shape.high_exclusive, "Maximum"),
    ):
        if value is not None:
            schema[f"exclusive{name}" if exclusive else name.lower()] = _plain_number(value)
    if shape.multiple is not None:
        schema["multipleOf"] = _plain_number(shape.multiple)
    return schema


def _countable(shape: Shape) -> Shape:
    """Bounds drawn inwards to where llguidance, which counts in doubles and 64 bits, is exact."""
    if not isinstance(shape, Number):
        return shape
    low, high = (
        shape.low and _exact(shape.low, up=True),
        shape.high and _exact(shape.high, up=False),
    )
    if not shape.integer:
        return replace(shape, low=low, high=high)
    found = replace(shape, low=low and max(low, -_INT64), high=high and min(high, _INT64))
    if not _is_crossed(found):
        return found
    keyword = "maximum" if found.low is None or found.low <= 0 else "minimum"
    why = "whole numbers beyond 64 bits, and single ones beyond 53, cannot be compared"
    return Refused(Refusal("", keyword, why, "leave it out, or take a string with a 'pattern'"))


def _is_crossed(shape: Number) -> bool:
    low = -_INT64 if shape.low is None else shape.low
    high = _INT64 if shape.high is None else shape.high
    return low > high


def _exact(bound: Fraction, *, up: bool) -> Fraction:
    """A bound of more than 53 bits as the nearest double that allows no more than it does."""
    if abs(bound) <= _DOUBLE_INT or bound.denominator != 1:
        return bound
    near = float(bound)
    if Fraction(near) != bound and (Fraction(near) > bound) != up:
        near = math.nextafter(near, math.inf if up else -math.inf)
    return Fraction(near)


def _plain_number(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def _string(shape: String) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if shape.low:
        schema["minLength"] = shape.low
    if shape.high is not None:
        schema["maxLength"] = shape.high
    patterns = [anchored(node) for node in shape.patterns]
    if len(patterns) == 1:
        schema["pattern"] = patterns[0]
    elif patterns:
        schema["allOf"] = [{"pattern": pattern} for pattern in patterns]
    return schema


def _any_of(schemas: list[dict[str, Any]]) -> Any:
    if not schemas:
        return False
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def mapped(schema: Any, change: Callable[[Any], Any]) -> Any:
    """A written schema with each schema directly inside it changed."""
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for key in _SINGLE & found.keys():
        found[key] = change(found[key])
    for key in _LISTS & found.keys():
        found[key] = [change(each) for each in found[key]]
    for key in _MAPS & found.keys():
        found[key] = {name: change(each) for name, each in found[key].items()}
    return found


def inner(schema: Any) -> list[Any]:
    """The schemas directly inside a written schema, as `mapped` finds them."""
    found: list[Any] = []
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in _SINGLE:
            found.append(value)
        elif key in _LISTS:
            found += value
        elif key in _MAPS:
            found += value.values()
    return found


def _references(schema: Any) -> list[str]:
    """The definitions that a schema refers to."""
    found: list[str] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict) and "$ref" in node:
            found.append(node["$ref"].removeprefix(REFERENCE))
        waiting += inner(node)
    return found


def _barren(written: dict[str, Any]) -> set[str]:
    """Definitions of which no finite document can be made, since they demand themselves."""
    barren = set(written)
    while True:
        fertile = {name for name in barren if not _leads_to(written[name], barren)}
        if not fertile:
            return barren
        barren -= fertile


def _leads_to(schema: Any, barren: set[str]) -> bool:
    """Whether every value of a schema needs a barren definition."""
    if not isinstance(schema, dict):
        return schema is False
    if "$ref" in schema:
        return schema["$ref"].removeprefix(REFERENCE) in barren
    if "anyOf" in schema:
        return all(_leads_to(each, barren) for each in schema["anyOf"])
    if schema.get("type") == "object":
        needed = [schema["properties"][name] for name in schema.get("required", ())]
        return any(_leads_to(each, barren) for each in needed)
    if schema.get("type") == "array":
        least = schema.get("minItems", 0)
        prefix = schema.get("prefixItems", [])[:least]
        rest = [schema.get("items", {})] if least > len(prefix) else []
        return any(_leads_to(each, barren) for each in [*prefix, *rest])
    return False


def _pruned(schemas: dict[str, Any], barren: set[str]) -> dict[str, Any]:
    """The same without ways into barren definitions, on which output could not end."""

    def prune(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return False if _leads_to(schema, barren) else schema
        if "anyOf" in schema:
            return _any_of([prune(s) for s in schema["anyOf"] if not _leads_to(s, barren)])
        return _short_of_barren(mapped(schema, prune))

    kept = {name: schema for name, schema in schemas.items() if name not in barren}
    return {name: prune(schema) for name, schema in kept.items()}


def _short_of_barren(schema: dict[str, Any]) -> dict[str, Any]:
    """A list whose items cannot be ends before them."""
    prefix = schema.get("prefixItems", [])
    if isinstance(prefix, list) and False in prefix:
        end = prefix.index(False)
        schema |= {"prefixItems": prefix[:end], "items": False}
        schema.pop("maxItems", None)
    return schema


def _assembled(schemas: dict[str, Any], references: dict[str, list[str]]) -> Any:
    """The root with definitions put in place, and the others under `$defs`."""
    uses = Counter(name for names in references.values() for name in names)
    looped = _looped(references)
    place = {
        name
        for name, schema in schemas.items()
        if name not in looped
        # Copies of what refers further could double at each level.
        and (uses[name] == 1 or (not references[name] and len(json.dumps(schema)) <= _SHORT))
    }

    def put(schema: Any) -> Any:
        if isinstance(schema, dict) and "$ref" in schema:
            name = schema["$ref"].removeprefix(REFERENCE)
            return put(schemas[name]) if name in place else schema
        return mapped(schema, put)

    root = put(schemas["root"])
    kept = {n: put(s) for n, s in schemas.items() if n != "root" and n not in place}
    reachable = _reachable(root, kept) if kept else ()
    if reachable:
        root = {"$defs": {n: s for n, s in kept.items() if n in reachable}, **root}
    return root


def _looped(references: dict[str, list[str]]) -> set[str]:
    """A definition of each circle of references."""
    after = {name: sorted(set(names)) for name, names in references.items()}
    found, seen = set[str](), set[str]()
    for start in list(after):
        if start in seen:
            continue
        seen.add(start)
        path, stack = {start}, [(start, iter(after[start]))]
        while stack:
            name, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                stack.pop()
                path.discard(name)
            elif following in path:
                found.add(following)
            elif following not in seen:
                seen.add(following)
                path.add(following)
                stack.append((following, iter(after[following])))
    return found


def _reachable(root: Any, kept: dict[str, Any]) -> set[str]:
    reachable: set[str] = set()
    waiting = [root]
    while waiting:
        for name in _references(waiting.pop()):
            if name not in reachable:
                reachable.add(name)
                waiting.append(kept[name])
    return reachable
