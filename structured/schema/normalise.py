"""A schema as users write it → the same meaning in few keywords, or refusals."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plait.platform.errors import GrammarTooComplex
from plait.structured.schema import faults, uniqueness
from plait.structured.schema import meaning as meanings
from plait.structured.schema.document import Document
from plait.structured.schema.limits import Limits, check_bounds
from plait.structured.schema.meaning import Meaning
from plait.structured.schema.reading import Reader
from plait.structured.schema.refusal import Refusal
from plait.structured.schema.writing import Writer
from plait.structured.spec import GrammarSpec

ASSERTIONS = frozenset(
    {
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "type",
        "enum",
        "const",
        "nullable",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "properties",
        "required",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    }
)


@dataclass(frozen=True, slots=True)
class Normalised:
    """A schema in few keywords. With refusals it is incomplete, and must not be used.

    What no grammar holds is in `checks`; see `uniqueness`.
    """

    schema: Any
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]
    keywords: tuple[tuple[str, str], ...]  # pointer and name of each that asserts something
    checks: bytes = b""
    meaning: Meaning = meanings.NARROW


def normalise(
    schema: Any, spec: GrammarSpec, limits: Limits | None = None, *, whole: bool = False
) -> Normalised:
    """Read and write a schema. Raises `InvalidSchema` or `GrammarTooComplex`.

    `checks` are made only for a schema of the `whole` text, since they are kept from its start.
    """
    limits = limits or Limits()
    text = check_bounds(schema, limits, spec.param)
    with _no_collections():
        return _normalised(schema, text, spec, limits, whole=whole)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without the collector of cycles, which walks through all that a reader remembers.

    The work is bounded, and so is what is left to it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _normalised(
    schema: Any, text: str, spec: GrammarSpec, limits: Limits, *, whole: bool
) -> Normalised:
    if spec.options.get("disable_additional_properties") is True:
        schema = _closed(schema)
    document = Document(schema, spec.param, text)
    foreign = tuple(faults.foreign_dialects(document.walk()))
    if foreign:
        return Normalised(False, foreign, (), ())
    meaning = meanings.read(schema, text, spec)
    reader = Reader(document, limits, meaning)
    writer = Writer(reader)
    if (slip := faults.malformed(document)) is not None:
        raise reader.invalid(*slip)
    try:
        written = writer.write(reader.formula(""))
    except RecursionError:
        raise GrammarTooComplex(
            "the schema leads too deep through its references; flatten it", param=spec.param
        ) from None
    nodes = document.walk()
    refusals = dict.fromkeys(faults.of_nodes(nodes)) | writer.refusals
    # What was written beside refusals has holes.
    planned = (
        uniqueness.Plan(written) if refusals else uniqueness.plan(written, writer.text, whole=whole)
    )
    refusals |= dict.fromkeys(planned.refusals)
    if spec.strict:
        refusals |= dict.fromkeys(map(faults.open_object, writer.open_objects))
        refusals |= dict.fromkeys(faults.of_strict(document))
    unknown = _unknown(nodes)
    notes = [f"unknown keywords assert nothing: {', '.join(unknown[:20])}"] if unknown else []
    notes += faults.dialect_notes(nodes)
    return Normalised(
        planned.schema,
        tuple(sorted(refusals, key=lambda each: each.pointer)),
        (*reader.notes, *map(_narrowed, writer.narrowed), *notes),
        tuple(_keywords(nodes)),
        planned.checks,
        meaning,
    )


def _narrowed(left_out: Refusal) -> str:
    place = f"{left_out.keyword!r} at {left_out.pointer}"
    return f"{place}: {left_out.why}; some valid answers are never given"


ANNOTATIONS = frozenset(
    {
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$defs",
        "definitions",
        "$comment",
        "$vocabulary",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    }
)


def _closed(schema: Any) -> Any:
    """Objects that list their properties allow no others, unless they say so themselves."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {k: v if k in ("enum", "const") else _closed(v) for k, v in schema.items()}
    if isinstance(schema.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


_Nodes = list[tuple[str, dict[str, Any]]]


def _keywords(nodes: _Nodes) -> list[tuple[str, str]]:
    return [(f"{at}/{key}", key) for at, node in nodes for key in node if key in ASSERTIONS]


def _unknown(nodes: _Nodes) -> list[str]:
    names = {key for _, node in nodes for key in node} - ASSERTIONS - ANNOTATIONS
    return sorted(name for name in names if not name.startswith("x-"))
