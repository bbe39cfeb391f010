"""Strict schemas: OpenAI's subset is served, and what it asks of objects is demanded."""

import random

import jsonschema
import pytest
from support.schemas import acceptor, accepts, closed, compact, mutate, sample, schema_spec

from plait.platform.errors import UnsupportedSchemaKeyword
from plait.structured.router import route

# OpenAI's strict subset, keyword by keyword (its guide to structured outputs).
STRICT = {
    "string": {"type": "string"},
    "pattern": {"type": "string", "pattern": "^@[a-zA-Z0-9_]+$"},
    "pattern of any": {"type": "string", "pattern": "^.{1,5}$"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "date": {"type": "string", "format": "date"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email"},
    "hostname": {"type": "string", "format": "hostname"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "number": {"type": "number", "minimum": -130.5, "maximum": 130},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multiple": {"type": "number", "multipleOf": 0.5},
    "integer": {"type": "integer", "minimum": 1, "maximum": 10, "multipleOf": 2},
    "array": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    "enum": {"enum": ["a", "b", 'ü\n"', 3, None]},
    "const": {"const": "only"},
    "nullable": {"type": ["string", "null"]},
    "anyOf": {"anyOf": [{"type": "integer"}, closed({"x": {"type": "boolean"}})]},
    "length": {"type": "string", "minLength": 2, "maxLength": 4},
    "described": {"type": "string", "description": "d", "title": "t", "default": "x"},
}


@pytest.mark.parametrize("name", STRICT)
def test_openais_strict_subset_is_served(name):
    schema = closed({"v": STRICT[name], "w": {"type": "boolean"}})
    found = route(schema_spec(schema, strict=True))
    grammar, judge = acceptor(found), jsonschema.Draft202012Validator(schema)
    rng = random.Random(name)
    accepted = 0
    for _ in range(60):
        document = mutate(sample(found.content, rng), rng)
        if grammar.accepts(compact(document)):
            accepted += 1
            assert judge.is_valid(document), document
    assert accepted or {"format", "pattern"} & STRICT[name].keys()


def test_recursion_by_root_and_by_definition_is_served():
    node = closed(
        {
            "value": {"type": "number"},
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        }
    )
    linked = closed({"list": {"$ref": "#/$defs/node"}}, **{"$defs": {"node": node}})
    assert accepts(linked, {"list": {"value": 1, "next": {"value": 2, "next": None}}}, strict=True)
    tree = closed(
        {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}}
    )
    assert accepts(tree, {"name": "a", "children": [{"name": "b", "children": []}]}, strict=True)
    assert not accepts(tree, {"name": "a", "children": [{"name": "b"}]}, strict=True)


def test_strict_demands_closed_objects():
    schema = {"type": "object", "properties": {"a": {}}, "required": ["a"]}
    with pytest.raises(UnsupportedSchemaKeyword, match="additionalProperties"):
        route(schema_spec(schema, strict=True))
    options = {"disable_additional_properties": True}
    grammar = acceptor(route(schema_spec(schema, strict=True, options=options)))
    assert grammar.accepts('{"a":1}')
    assert not grammar.accepts('{"a":1,"b":1}')


OPTIONAL = closed({"a": {"type": "string"}, "b/c": {"type": "string"}}) | {"required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (OPTIONAL, "/required"),
        (closed({"o": OPTIONAL}), "/properties/o/required"),
        (closed({"o": {"type": "array", "items": OPTIONAL}}), "/properties/o/items/required"),
        (closed({"o": {"anyOf": [{"type": "null"}, OPTIONAL]}}), "/properties/o/anyOf/1/required"),
        ({"$defs": {"d": OPTIONAL}} | closed({"o": {"$ref": "#/$defs/d"}}), "/$defs/d/required"),
        ({"x": {"d": OPTIONAL}} | closed({"o": {"$ref": "#/x/d"}}), "/x/d/required"),
        ({"allOf": [OPTIONAL]}, "/allOf/0/required"),
    ],
)
def test_strict_demands_that_every_object_lists_all_its_properties(schema, where):
    with pytest.raises(UnsupportedSchemaKeyword) as refused:
        route(schema_spec(schema, strict=True))
    assert refused.value.message.startswith(f"'required' at {where}: ")
    assert "'b/c' is not" in refused.value.message
    assert route(schema_spec(schema))


def test_what_is_required_around_an_objects_part_counts_for_strict():
    parts = [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]
    for schema in (
        {"allOf": parts, "additionalProperties": False, "properties": {"a": {}}},
        closed({"a": {}}) | {"anyOf": [{"properties": {"a": {"type": "null"}}}, parts[0]]},
        closed({"a": {"type": "object", "additionalProperties": False}}),
        closed({"a": {"type": "string"}}) | {"if": {"properties": {"b": {"const": 1}}}},
    ):
        assert route(schema_spec(schema, strict=True))
