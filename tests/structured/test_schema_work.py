"""What reading a schema costs: shortcuts change no result, and work is counted, not timed."""

import gc
import itertools
import json

import pytest
from support.schemas import schema_spec

from plait.platform.errors import GrammarTooComplex, PlaitError
from plait.structured.schema import lists, maps
from plait.structured.schema.kinds import Kinds
from plait.structured.schema.limits import Limits
from plait.structured.schema.normalise import ASSERTIONS, normalise
from plait.structured.schema.sharing import Sharing
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
    monkeypatch.setattr(Kinds, "_find", lambda *_: TYPES)
    assert quickly == [outcome(schema) for schema in schemas]
    assert sum(isinstance(each, str) for each in quickly) in range(20, len(schemas) // 2)


def test_work_beyond_the_bound_is_refused_by_name():
    members = [{"required": [name], "properties": {name: {}}} for name in "abcdefgh"]
    schema = {"oneOf": members}
    normalise(schema, schema_spec(schema))
    with pytest.raises(GrammarTooComplex, match=r"too complex: .* takes too long to unfold"):
        normalise(schema, schema_spec(schema), Limits(max_work=500))
    assert gc.isenabled()


# Of each keyword, a type and a value with which it says more than the type alone.
BESIDE = {
    "$ref": ("string", "#/$defs/short"),
    "$dynamicRef": ("string", "#/$defs/short"),
    "$recursiveRef": ("string", "#"),  # to an object, so to nothing
    "type": ("string", "integer"),
    "enum": ("string", ["a"]),
    "const": ("string", "a"),
    "nullable": ("string", True),
    "minimum": ("number", 1),
    "maximum": ("number", 1),
    "exclusiveMinimum": ("number", 1),
    "exclusiveMaximum": ("number", 1),
    "multipleOf": ("number", 3),
    "minLength": ("string", 1),
    "maxLength": ("string", 1),
    "pattern": ("string", "a"),
    "format": ("string", "date"),
    "items": ("array", {"type": "null"}),
    "prefixItems": ("array", [{"type": "null"}]),
    "minItems": ("array", 1),
    "maxItems": ("array", 1),
    "uniqueItems": ("array", True),
    "contains": ("array", {"type": "null"}),
    "unevaluatedItems": ("array", False),
    "properties": ("object", {"a": False}),
    "required": ("object", ["a"]),
    "patternProperties": ("object", {"^a": False}),
    "additionalProperties": ("object", False),
    "propertyNames": ("object", {"maxLength": 1}),
    "minProperties": ("object", 1),
    "maxProperties": ("object", 0),
    "dependentRequired": ("object", {"a": ["b"]}),
    "dependentSchemas": ("object", {"a": False}),
    "dependencies": ("object", {"a": ["b"]}),
    "unevaluatedProperties": ("object", False),
    "allOf": ("string", [{"maxLength": 1}]),
    "anyOf": ("string", [{"maxLength": 1}]),
    "oneOf": ("string", [{"maxLength": 1}]),
    "not": ("string", {"const": "a"}),
    "if": ("string", {"const": "a"}),
}
# They say something beside others only, which are above.
ALONE_SILENT = {"minContains", "maxContains", "then", "else", "additionalItems"}


def written(named, also):
    """What becomes of a type alone, and of the same type with a keyword."""
    schema = {
        "$defs": {"short": {"type": "string", "maxLength": 3}},
        "type": "object",
        "properties": {"alone": {"type": named}, "beside": {"type": named, **also}},
        "additionalProperties": False,
    }
    found = normalise(schema, schema_spec(schema), whole=True)
    properties = found.schema["properties"]
    return properties["alone"], properties.get("beside"), found


@pytest.mark.parametrize("keyword", BESIDE)
def test_a_type_with_a_keyword_beside_it_is_not_taken_for_the_type_alone(keyword):
    named, value = BESIDE[keyword]
    also = {"then": False} if keyword == "if" else {}
    alone, beside, found = written(named, {keyword: value} | also)
    assert beside != alone or found.checks or found.refusals


def test_each_keyword_that_asserts_something_is_tried_beside_a_type():
    assert set(BESIDE) | ALONE_SILENT == ASSERTIONS


def test_annotations_and_unknown_keywords_beside_a_type_change_nothing():
    alone, beside, _ = written("string", {"description": "a text", "x-order": 3, "then": False})
    assert alone == beside == {"type": "string"}


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "left": {"$ref": "#/$defs/node"},
                "right": {"$ref": "#/$defs/other"},
            },
        },
        "other": {"$ref": "#/$defs/node"},
        "self": {"$ref": "#/$defs/self"},
    },
    "type": "object",
    "properties": {f"tree{i}": {"$ref": "#/$defs/other"} for i in range(20)},
}


def test_what_many_places_refer_to_is_written_once(monkeypatch):
    def num_trees():
        found = normalise(TREE, schema_spec(TREE))
        assert not found.refusals
        return json.dumps(found.schema).count('"left"')

    assert num_trees() == 1
    monkeypatch.setattr(Sharing, "place", lambda _self, pointer: pointer)
    assert num_trees() > 20


def test_a_reference_to_itself_is_refused_and_one_to_nothing_too():
    for ref, message in (("#/$defs/self", "without end"), ("#/$defs/none", "there is no")):
        schema = {**TREE, "properties": {"a": {"$ref": ref}}, "required": ["a"]}
        with pytest.raises(PlaitError, match=message):
            normalise(schema, schema_spec(schema))


HUGE = 10**40


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "minLength": 10**6}, "'minLength' at /minLength"),
        ({"type": "array", "items": {"minLength": HUGE}}, "'minLength' at /items/minLength"),
        ({"type": "array", "minItems": float(HUGE)}, "'minItems' at /minItems"),
        ({"type": "array", "contains": {}, "minContains": HUGE}, "'minContains' at /minContains"),
        ({"type": "string", "not": {"maxLength": HUGE}}, "'maxLength' at /not/maxLength"),
    ],
)
def test_lower_bounds_that_no_answer_reaches_are_refused(schema, place):
    (refusal,) = normalise(schema, schema_spec(schema)).refusals
    assert str(refusal).startswith(place)
    assert "500,000 are the limit" in str(refusal)


def test_upper_bounds_that_no_answer_reaches_assert_nothing():
    for schema in (
        {"type": "string", "maxLength": HUGE},
        {"type": "string", "not": {"minLength": HUGE}},
        {"type": "array", "items": {"type": "string", "maxLength": 2**32}, "maxItems": HUGE},
        {"type": "object", "maxProperties": HUGE},
    ):
        found = normalise(schema, schema_spec(schema))
        assert not found.refusals
        assert "max" not in json.dumps(found.schema)
