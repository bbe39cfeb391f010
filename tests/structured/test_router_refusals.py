"""The router's refusals: what cannot be kept, by name and place; what is said of the rest."""

import re

import pytest
from support.schemas import acceptor, accepts, closed, schema_spec

from plait.platform.errors import GrammarTooComplex, InvalidSchema, UnsupportedSchemaKeyword
from plait.structured.router import explain, route


@pytest.mark.parametrize(
    ("schema", "error", "words"),
    [
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "array", "maxItems": 2}},
            UnsupportedSchemaKeyword,
            "'uniqueItems' at /uniqueItems",
        ),
        (
            {"properties": {"a/b": {"not": {"uniqueItems": True}}}},
            UnsupportedSchemaKeyword,
            "'uniqueItems' at /properties/a~1b/not/uniqueItems",
        ),
        ({"$ref": "https://example.org/x"}, UnsupportedSchemaKeyword, "'$ref' at /$ref"),
        ({"type": "string", "pattern": "(a(?=b).)*"}, UnsupportedSchemaKeyword, "lookaround"),
        ({"type": "string", "format": "regex"}, UnsupportedSchemaKeyword, "'format' at /format"),
        ({"x-guidance": {"lenient": True}}, UnsupportedSchemaKeyword, "x-guidance"),
        ({"type": "strng"}, InvalidSchema, "there is no type 'strng'"),
        ({"minLength": -1}, InvalidSchema, "/minLength"),
        ({"$ref": "#/$defs/none"}, InvalidSchema, "there is no '#/$defs/none'"),
        ({"allOf": [{"$ref": "#"}]}, InvalidSchema, "refers to itself"),
        ({"type": "string", "const": 1}, InvalidSchema, "no document"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            InvalidSchema,
            "no document",
        ),
        ({"maximum": 10**400}, GrammarTooComplex, "/maximum: a number beyond 1e+300"),
        ({"enum": [-(10**400)]}, GrammarTooComplex, "/enum/0: a number beyond"),
        ({"$ref": "#/none"}, InvalidSchema, "'$ref' at /: there is no '#/none'"),
        ({"$ref": "#/minimum", "minimum": 1}, InvalidSchema, "no '#/minimum' that is a schema"),
        ({"type": "string", "pattern": r"(a)\1"}, UnsupportedSchemaKeyword, "a back-reference"),
        (
            {"type": "integer", "minimum": 10**30, "maximum": 10**30 + 5},
            UnsupportedSchemaKeyword,
            "'minimum' at /minimum: whole numbers beyond 64 bits",
        ),
        ({"const": 2**64 - 1}, UnsupportedSchemaKeyword, "'const' at /const: 18446744073709551615"),
        ({"type": "number", "maximum": 1e300}, UnsupportedSchemaKeyword, "'maximum' at /maximum"),
        ({"enum": list(range(1001))}, GrammarTooComplex, "'enum' at /enum: 1,001 values"),
        ({"description": "x" * 65_536}, GrammarTooComplex, "bytes"),
        (["not", "a", "schema"], InvalidSchema, "JSON object"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(schema, error, words):
    with pytest.raises(error) as caught:
        route(schema_spec(schema, param="response_format"))
    assert words in caught.value.message
    assert caught.value.param == "response_format"


def test_a_refused_keyword_in_a_branch_that_cannot_be_met_does_no_harm():
    dead = {"type": "array", "not": {"uniqueItems": True}}
    assert accepts({"type": "string", "anyOf": [dead, {"enum": ["a"]}]}, "a")


@pytest.mark.parametrize("value", [True, False])
def test_required_as_in_draft_3_is_refused_where_it_stands(value):
    schema = {"type": "object", "properties": {"a~b": {"type": "string", "required": value}}}
    with pytest.raises(UnsupportedSchemaKeyword) as refused:
        route(schema_spec({"items": schema}))
    assert refused.value.message.startswith("'required' at /items/properties/a~0b/required: ")
    assert "list 'a~b' in 'required' of the object at /items" in refused.value.message
    assert route(schema_spec({"type": "object", "properties": {"required": True}}))


@pytest.mark.parametrize(
    ("keywords", "place"),
    [
        ({"exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"minimum": 3, "exclusiveMaximum": True}, "exclusiveMaximum"),
        ({"minimum": True}, "minimum"),
        ({"multipleOf": False}, "multipleOf"),
    ],
)
def test_a_bound_that_is_no_number_is_refused_where_it_stands(keywords, place):
    with pytest.raises(InvalidSchema, match=f"/properties/a/{place}"):
        route(schema_spec({"properties": {"a": {"type": "integer", **keywords}}}))


def test_a_bound_that_draft_4_excludes_is_excluded():
    schema = {"type": "integer", "minimum": 3, "exclusiveMinimum": True}
    assert [number for number in (2, 3, 4) if accepts(schema, number)] == [4]


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-03/schema#",
        "https://json-schema.org/draft-02/schema",
        "http://json-schema.org/draft-08/schema#",
        "https://json-schema.org/draft/2031-01/schema",
        "http://example.com/draft-03/schema",
    ],
)
def test_a_dialect_that_is_not_served_is_refused_by_its_name(dialect):
    for schema in (
        {"$schema": dialect, "type": "any"},
        {"$defs": {"a": {"$schema": dialect}}, "type": "string"},
    ):
        with pytest.raises(UnsupportedSchemaKeyword, match=re.escape(repr(dialect))) as refused:
            route(schema_spec(schema))
        assert refused.value.message.startswith("'$schema' at /")


@pytest.mark.parametrize(
    "dialect",
    [
        *(f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 5, 6, 7)),
        "http://json-schema.org/schema#",
        "http://json-schema.org/draft-07/hyper-schema#",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    ],
)
def test_the_dialects_of_the_standard_are_served_as_they_are(dialect):
    assert route(schema_spec({"$schema": dialect, "type": "string"})).notes == ()


def test_a_dialect_of_ones_own_is_read_as_the_latest_and_told():
    found = route(schema_spec({"$schema": "https://example.com/mine", "type": "string"}))
    assert found.notes == ("'$schema': 'https://example.com/mine' is unknown, and read as 2020-12",)


@pytest.mark.parametrize(
    "pattern", ["^\\x01$", "^\\x00$", "^\\x7f$", "a\\x1fb", "^[\\x00-\\x07]+$"]
)
def test_a_pattern_of_control_characters_alone_is_refused(pattern):
    for schema, at in (
        ({"pattern": pattern}, ""),
        ({"propertyNames": {"pattern": pattern}}, "/propertyNames"),
    ):
        with pytest.raises(UnsupportedSchemaKeyword, match="control characters") as refused:
            route(schema_spec(schema))
        assert refused.value.message.startswith(f"'pattern' at {at}/pattern: ")
    assert acceptor(route(schema_spec({"type": "string", "pattern": f"{pattern}|^b$"}))).accepts(
        '"b"'
    )


@pytest.mark.parametrize("text", ["\x01", "a\x7f"])
def test_a_listed_text_with_a_control_character_is_written_or_refused(text):
    found = route(schema_spec({"enum": [text, "k"]}))
    assert acceptor(found).accepts(f'"{text[:-1]}\\u00{ord(text[-1]):02x}"')
    longer = closed({"a": {"const": [text]}, "b": {"type": "string", "maxLength": 3}})
    with pytest.raises(
        UnsupportedSchemaKeyword, match=r"'const' at /properties/a/const: .* control"
    ):
        route(schema_spec(longer))


def test_notes_tell_what_asserts_nothing():
    found = route(schema_spec({"type": "integer", "format": "int32", "markdownDescription": "x"}))
    assert found.notes == ("unknown keywords assert nothing: markdownDescription",)
    found = route(schema_spec({"type": "string", "format": "password"}))
    assert "'password'" in found.notes[0]


def test_explain_names_each_keyword():
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 3},
            "b": {"uniqueItems": True, "items": {"type": "array", "maxItems": 2}},
        },
    }
    findings = {each.pointer: each for each in explain(schema_spec(schema))}
    assert findings["/properties/b/uniqueItems"].backend is None
    assert "held apart" in findings["/properties/b/uniqueItems"].why
    assert findings["/properties/a/maxLength"].backend == "llguidance"
    assert "xgrammar" in findings["/properties/a/maxLength"].why
