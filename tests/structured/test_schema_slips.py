"""Schemas that contradict themselves, or say what no keyword says: refused, with the place."""

from __future__ import annotations

from typing import Any

import pytest

from plait.platform.errors import InvalidSchema
from plait.structured.router import route
from plait.structured.spec import GrammarKind, GrammarSpec


def routed(schema: Any) -> Any:
    return route(GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=schema, param="schema"))


def of(key: str, inner: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {key: inner}, "required": [key], **more}


NEVER = {"type": "integer", "minimum": 5, "maximum": 3}


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        (NEVER, "/"),
        (False, "/"),
        (of("a", NEVER), "/properties/a"),
        (of("a/b", False), "/properties/a~1b"),
        (of("a", of("b", NEVER)), "/properties/a/properties/b"),
        (of("a", {"type": "array", "items": NEVER, "minItems": 1}), "/properties/a/items"),
        (of("a", {"allOf": [{}, {"enum": []}]}), "/properties/a/allOf/1"),
        (of("a", {"allOf": [{"type": "string"}, {"type": "null"}]}), "/properties/a"),
        (of("a", {"$ref": "#/$defs/n"}, **{"$defs": {"n": NEVER}}), "/properties/a"),
        ({"anyOf": [NEVER, {"enum": []}]}, "/"),
    ],
)
def test_what_no_document_fulfils_is_refused_with_its_place(schema: Any, at: str) -> None:
    with pytest.raises(InvalidSchema, match="no document fulfils") as caught:
        routed(schema)
    assert f"what stands at {at} contradicts itself" in caught.value.message
    assert caught.value.param == "schema"


def test_what_need_not_come_may_contradict_itself() -> None:
    schema = of("a", {"type": "string", "maxLength": 3}, additionalProperties=False)
    schema["properties"]["b"] = NEVER
    assert routed(schema).backend
    assert routed({"anyOf": [NEVER, {"type": "null"}]}).backend
    assert routed({"type": "array", "items": NEVER, "maxItems": 2}).backend


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "integer", "minLength": "q"}, "/minLength: 'minLength' is a whole number"),
        ({"type": "integer", "maxItems": -1}, "/maxItems: 'maxItems' is a whole number"),
        ({"type": "null", "minProperties": 1.5}, "/minProperties: 'minProperties' is a whole"),
        ({"type": "null", "maxLength": True}, "/maxLength: 'maxLength' is a whole number"),
        ({"type": "string", "minimum": "3"}, "/minimum: 'minimum' is a number"),
        ({"type": "string", "multipleOf": [2]}, "/multipleOf: 'multipleOf' is a number"),
        ({"type": "integer", "pattern": 1}, "/pattern: 'pattern' is a string"),
        ({"type": "boolean", "format": {}}, "/format: 'format' is a string"),
    ],
)
def test_malformed_keywords_are_refused_whatever_type_they_are_for(node: Any, words: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        routed(node)
    assert caught.value.message.startswith(words)
    with pytest.raises(InvalidSchema) as caught:
        routed(of("a", node))
    assert caught.value.message.startswith(f"/properties/a{words}")


def test_well_formed_keywords_of_other_types_say_nothing() -> None:
    node = {"type": "boolean", "minLength": 2.0, "maximum": 1.5, "pattern": "a", "minItems": None}
    assert routed(node).backend
    # A property of that name is no keyword, and what stands beside a reference is not read there.
    assert routed(of("minLength", {"type": "boolean"}, additionalProperties=False)).backend
    legacy = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$ref": "#/definitions/a",
        "minLength": "q",
        "definitions": {"a": {"type": "boolean"}},
    }
    assert routed(legacy).backend
