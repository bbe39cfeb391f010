"""What reading a schema costs: shortcuts change no result, and work is counted, not timed."""

import gc
import itertools

import pytest
from support.schemas import schema_spec

from plait.platform.errors import GrammarTooComplex, PlaitError
from plait.structured.schema import lists, maps
from plait.structured.schema.limits import Limits
from plait.structured.schema.normalise import normalise
from plait.structured.schema.reading import Reader
from plait.structured.schema.values import TYPES

MEMBERS = [
    {"properties": {"a": {"const": 1}}, "required": ["a"]},
    {"properties": {"a": {"type": "string"}, "b": False}, "required": ["b"]},
    {"additionalProperties": False, "properties": {"c": {"type": "null"}}},
    {"required": ["a"], "additionalProperties": {"type": "boolean"}},
    {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
    {"type": "array", "items": False, "minItems": 1},
    {"$ref": "#/$defs/text"},
    {"enum": [1, "one", {"a": 1}]},
]
DEFINITIONS = {"text": {"$ref": "#/$defs/short"}, "short": {"type": "string", "maxLength": 3}}


def combinations():
    for keyword in ("oneOf", "anyOf", "allOf"):
        for members in itertools.combinations(MEMBERS, 3):
            yield {"$defs": DEFINITIONS, keyword: list(members)}


def outcome(schema):
    try:
        found = normalise(schema, schema_spec(schema))
    except PlaitError as error:
        return str(error)
    return found.schema, found.refusals, found.notes


def test_what_is_told_dead_early_is_what_has_no_shapes(monkeypatch):
    schemas = list(combinations())
    quickly = [outcome(schema) for schema in schemas]
    monkeypatch.setattr(maps, "is_dead", lambda *_: None)
    monkeypatch.setattr(lists, "is_dead", lambda *_: None)
    monkeypatch.setattr(Reader, "_find_kinds", lambda *_: TYPES)
    assert quickly == [outcome(schema) for schema in schemas]
    assert sum(isinstance(each, str) for each in quickly) in range(20, len(schemas) // 2)


def test_work_beyond_the_bound_is_refused_by_name():
    members = [{"required": [name], "properties": {name: {}}} for name in "abcdefgh"]
    schema = {"oneOf": members}
    normalise(schema, schema_spec(schema))
    with pytest.raises(GrammarTooComplex, match=r"too complex: .* takes too long to unfold"):
        normalise(schema, schema_spec(schema), Limits(max_work=500))
    assert gc.isenabled()
