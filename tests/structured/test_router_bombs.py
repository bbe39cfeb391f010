"""Schemas made to take long or to go deep: routed or refused, at once and without a crash."""

import contextlib
import time

import pytest
from support.schemas import closed, schema_spec

from plait.platform.errors import GrammarTooComplex, InvalidSchema, UnsupportedSchemaKeyword
from plait.structured.router import route


@pytest.mark.parametrize(
    "bomb",
    [
        {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(1, 30)]},
        closed({f"a{i}": {"type": "string", "maxLength": 128 + i} for i in range(20)}),
        {
            "not": {
                "allOf": [
                    {"not": {"anyOf": [{"minimum": i}, {"multipleOf": i}]}} for i in range(2, 40)
                ]
            }
        },
        {"type": "integer", "multipleOf": 123456789},
        {
            "$defs": {
                f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}
                for i in range(50)
            }
            | {"d50": {"type": "null"}},
            "$ref": "#/$defs/d0",
        },
        {"type": "string", "pattern": "^(" * 90 + "a" + ")*$" * 90},
        {"type": "string", "not": {"pattern": "(a|b)*a(a|b){40}"}},
    ],
)
def test_a_bomb_is_routed_or_refused_at_once(bomb):
    start = time.process_time()
    with contextlib.suppress(GrammarTooComplex, UnsupportedSchemaKeyword):
        route(schema_spec(bomb))
    assert time.process_time() - start < 2


def nested(depth, wrap):
    schema = {"type": "null"}
    for _ in range(depth):
        schema = wrap(schema)
    return schema


NESTINGS = {
    "not": lambda inner: {"not": inner},
    "items": lambda inner: {"type": "array", "items": inner},
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "string"}]},
    "oneOf": lambda inner: {"oneOf": [inner, {"type": "object", "properties": {"a": inner}}]},
    "properties": lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
}


# oneOf doubles at each level: deeper ones are beyond any bound of bytes before they are built.
@pytest.mark.parametrize(
    ("kind", "depth"),
    [
        (kind, depth)
        for kind in NESTINGS
        for depth in (8, 60, 2000)
        if kind != "oneOf" or depth < 60
    ],
)
def test_depth_is_served_or_refused_never_a_crash(kind, depth):
    with contextlib.suppress(GrammarTooComplex, UnsupportedSchemaKeyword, InvalidSchema):
        route(schema_spec(nested(depth, NESTINGS[kind])))
