"""The router: which backend for what, what is refused and how, and what text gets through."""

import contextlib
import json
import random
import re
import time
from decimal import Decimal

import jsonschema
import pytest
from support.schemas import acceptor, accepts, compact, mutate, sample, schema_spec

from plait.platform.errors import (
    GrammarTooComplex,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    UnsupportedSchemaKeyword,
)
from plait.structured.router import explain, route
from plait.structured.spec import GrammarKind, GrammarSpec


def closed(properties, required=None, **more):
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
        **more,
    }


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


@pytest.mark.parametrize(
    ("schema", "backend"),
    [
        (closed({"a": {"type": "integer", "minimum": 3}}, []), "xgrammar"),
        ({"type": "object"}, "xgrammar"),
        ({"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 5}, "xgrammar"),
        ({"type": "string", "pattern": "^[a-z]{2,8}-[0-9]+$"}, "xgrammar"),
        ({"type": "string", "maxLength": 5}, "llguidance"),  # raw control characters
        ({"type": "string", "pattern": '^a"b$'}, "llguidance"),  # not escaped
        ({"type": "string", "pattern": "^.{0,200}$"}, "llguidance"),
        ({"properties": {"a": {"type": "integer"}}, "type": "object"}, "llguidance"),
        ({"type": "number", "maximum": 5}, "llguidance"),
    ],
)
def test_xgrammar_gets_what_is_proven_and_llguidance_the_rest(schema, backend):
    assert route(schema_spec(schema)).backend == backend


def test_another_version_of_xgrammar_has_no_proof(monkeypatch):
    monkeypatch.setattr("plait.structured.router.xgrammar_version", lambda: "0.9.9")
    assert route(schema_spec(closed({"a": {"type": "null"}}))).backend == "llguidance"


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


@pytest.mark.parametrize(
    ("schema", "given", "left_out", "never"),
    [
        (  # what `contains` asks for comes early, in a list of any length
            {"type": "array", "items": {"type": ["null", "integer"]}, "contains": {"const": None}},
            [[None], [1, None, 2], [1] * 7 + [None]],
            [[1] * 8 + [None]],
            [[], [1, 2]],
        ),
        (
            {"type": "array", "contains": {"const": None}, "minContains": 0, "maxContains": 1},
            [[], [1, None], [1, 2, 3, None, 4]],
            [[1, 2, 3, 4, 5, 6, 7, 8, None]],
            [[None, None], [1, None, 2, 3, None]],
        ),
        (  # free keys that are wrong for the other member are all wrong
            {
                "oneOf": [
                    {"type": "object", "additionalProperties": {"type": "integer"}},
                    {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
                ]
            },
            [{"x": None}, {"x": None, "y": None}],
            [{"x": None, "y": 1}],
            [{}, {"x": 1}, {"x": "a"}],
        ),
    ],
)
def test_of_what_no_grammar_tells_whole_a_part_is_given_and_the_answer_says_so(
    schema, given, left_out, never
):
    found = route(schema_spec(schema))
    grammar = acceptor(found)
    assert any("some valid answers are never given" in note for note in found.notes)
    assert all(grammar.accepts(compact(each)) for each in given)
    assert not any(grammar.accepts(compact(each)) for each in [*left_out, *never])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("power", [53, 62, 63, 64, 100])
def test_whole_numbers_beyond_what_backends_count_are_exact_or_refused(power, sign):
    generator = random.Random(power)
    for off in (*range(-3, 4), *(generator.randint(-5000, 5000) for _ in range(30))):
        edges = [sign * 2**power + off, sign * 2**power + off + generator.choice([0, 5, 1 << 40])]
        for bounds in (edges, [edges[0], None], [None, edges[1]]):
            named = zip(("minimum", "maximum"), bounds, strict=True)
            schema = {"type": "integer", **{k: v for k, v in named if v is not None}}
            try:
                grammar = acceptor(route(schema_spec(schema)))
            except UnsupportedSchemaKeyword:
                continue
            near = (edge + i * step for edge in edges for i in (-1, 0, 1) for step in (1, 2, 1024))
            for number in [*near, 0, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1]:
                if grammar.accepts(str(number)):
                    jsonschema.validate(number, schema)


@pytest.mark.parametrize("power", [53, 62, 63, 64, 70, 100])
@pytest.mark.parametrize("beside", [{"type": "string", "pattern": "^x$"}, {"maxLength": 2}])
def test_listed_numbers_beyond_53_bits_come_out_as_they_are_or_are_refused(power, beside):
    for number in (2**power - 1, 2**power, -(2**power) - 1, 10 ** (power // 3), float(2**power)):
        schema = {"anyOf": [{"const": number}, {"const": {"a": [number]}}, beside]}
        try:
            grammar = acceptor(route(schema_spec(schema)))
        except UnsupportedSchemaKeyword:
            continue
        plain = int(number)
        spelled = {plain, int(float(plain)), int(Decimal(repr(float(plain))))}
        for text in [str(each) for each in spelled] + [f'{{"a":[{each}]}}' for each in spelled]:
            if grammar.accepts(text):
                jsonschema.validate(json.loads(text), schema)


def test_identifiers_of_64_bits_can_be_listed():
    listed = [1145141919810364364, 9007199254740993, 2**63 - 1]
    grammar = acceptor(route(schema_spec(closed({"id": {"enum": listed}}))))
    assert [n for n in range(2**53, 2**53 + 4) if grammar.accepts(f'{{"id":{n}}}')] == [2**53 + 1]
    assert all(grammar.accepts(f'{{"id":{number}}}') for number in listed)


def test_bounds_of_64_bit_types_are_served():
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (0, 10**30)):
        schema = {"type": "integer", "minimum": low, "maximum": high}
        assert acceptor(route(schema_spec(schema))).accepts(str(2**53 + 1))


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


def test_free_keys_cannot_repeat_a_declared_one_by_an_escape():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = acceptor(route(schema_spec(schema)))
    assert grammar.accepts('{"b":"x"}')
    assert not grammar.accepts('{"\\u0061":"x"}')
    assert not grammar.accepts('{"a":1,"a":"x"}')


def test_lists_of_few_values_without_repetition_are_written_out():
    schema = {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True, "minItems": 1}
    assert accepts(schema, ["b"])
    assert accepts(schema, [3, "b", "a"])
    assert not any(accepts(schema, wrong) for wrong in ([], ["a", "a"], [3, "b", "a", 3]))


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


def test_a_key_of_two_patterns_obeys_both_and_no_other():
    integer, small = {"type": "integer"}, {"maximum": 5}
    schema = {
        "type": "object",
        "patternProperties": {"a": integer, "b": small},
        "additionalProperties": integer,
    }
    grammar, judge = acceptor(route(schema_spec(schema))), jsonschema.Draft202012Validator(schema)
    for name in ("xa", "bx", "ab", "ba", "c"):
        for value in (1, 9, "x", None):
            document = {name: value}
            assert grammar.accepts(compact(document)) == judge.is_valid(document), document


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 3}])
def test_strings_hold_escapes_and_no_raw_control_characters(schema):
    grammar = acceptor(route(schema_spec(schema)))
    assert all(grammar.accepts(compact(c)) for c in '"\\\n\r\té€😀')
    assert not any(grammar.accepts(b'"' + bytes([i]) + b'"') for i in range(32))
    assert not grammar.accepts(b'"\xff"')


@pytest.mark.parametrize(
    "pattern", ['[^"]', "[^\\\\]", '[^"a]', "[\\x00-\\x1f]", "[^\\x00-\\x1f]", "[^\\n]"]
)
@pytest.mark.parametrize("form", ["^{}$", "^{}+$", "^x{}$"])
def test_each_character_is_judged_by_the_pattern_alone(pattern, form):
    schema = {"type": "string", "pattern": form.format(pattern)}
    grammar, judge = acceptor(route(schema_spec(schema))), jsonschema.Draft202012Validator(schema)
    for char in [*map(chr, range(128)), "é", "€", "😀"]:
        for text in (char, f"x{char}", f"{char}{char}"):
            if grammar.accepts(compact(text)):
                assert judge.is_valid(text), (schema, text)


def test_whitespace_is_none_or_bounded():
    schema = closed({"a": {"type": "null"}})
    assert not accepts_text(schema, '{"a": null}')
    for options in ({"any_whitespace": True}, {"whitespace_pattern": r"[ \n]{0,2}"}):
        assert accepts_text(schema, '{"a": null}', options)
        assert accepts_text(schema, '{"a":null}', options)
        assert not accepts_text(schema, '{"a":' + " " * 50 + "null}", options)
    with pytest.raises(InvalidRegex, match="whitespace_pattern"):
        route(schema_spec(schema, options={"whitespace_pattern": "x"}))


def accepts_text(schema, text, options=None):
    return acceptor(route(schema_spec(schema, options=options or {}))).accepts(text)


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


# --- other kinds ---


def of_kind(kind, content):
    return route(GrammarSpec(kind=kind, content=content, param="structured_outputs"))


def test_choices_come_out_as_they_are_and_nothing_else():
    choices = ["yes", "no", 'say "hi"', "a\\b", "ü\n", "😀", "yes, but"]
    grammar = acceptor(of_kind(GrammarKind.CHOICE, choices))
    assert all(map(grammar.accepts, choices))
    assert not any(map(grammar.accepts, ["", "ye", "yes!", "say", "\\u00fc\n"]))
    for wrong in ([], "yes", [""], [1]):
        with pytest.raises(InvalidGrammar):
            of_kind(GrammarKind.CHOICE, wrong)


@pytest.mark.parametrize(
    ("pattern", "backend", "yes", "no"),
    [
        ("[a-z]+@[a-z]+\\.com", "xgrammar", ["a@b.com"], ["a@bxcom", "a@b.com "]),
        ("^(yes|no)$", "xgrammar", ["yes", "no"], ["yesno", ""]),
        (".{2,200}", "llguidance", ["ab", 'é"'], ["a", "a\nb"]),
        ("[^x]*", "llguidance", ["", "é\n"], ["axb"]),
        ("\\d{3}", "xgrammar", ["123"], ["12", "٣٣٣"]),
    ],
)
def test_regular_expressions_match_from_end_to_end(pattern, backend, yes, no):
    found = of_kind(GrammarKind.REGEX, pattern)
    grammar = acceptor(found)
    assert found.backend == backend
    assert all(map(grammar.accepts, yes))
    assert not any(map(grammar.accepts, no))


@pytest.mark.parametrize(
    "pattern", ["(", "a**", "[z-a]", "(?=a)", r"(a)\1", r"(\ba)+", "a{3,1}", ""]
)
def test_an_unreadable_regular_expression_is_refused(pattern):
    with pytest.raises(InvalidRegex):
        of_kind(GrammarKind.REGEX, pattern)


def test_grammars_are_told_apart_by_their_text():
    ebnf = acceptor(of_kind(GrammarKind.GRAMMAR, 'root ::= "a" [0-9]+'))
    lark = acceptor(of_kind(GrammarKind.GRAMMAR, 'start: "a" /[0-9]+/'))
    for grammar in (ebnf, lark):
        assert grammar.accepts("a12")
        assert not grammar.accepts("a")
    for wrong in ("root ::= (", "start: nothing_here", "x", 'start: %json {"x-guidance":{}}'):
        with pytest.raises(InvalidGrammar):
            of_kind(GrammarKind.GRAMMAR, wrong)


def tag(schema):
    content = {"type": "json_schema", "json_schema": schema}
    return {
        "type": "structural_tag",
        "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"},
    }


def test_schemas_in_structural_tags_are_proven_too():
    schema = {"allOf": [closed({"a": {"type": "integer"}}), {"required": ["a"]}]}
    grammar = acceptor(of_kind(GrammarKind.STRUCTURAL_TAG, tag(schema)))
    assert grammar.accepts('<f>{"a":1}</f>')
    assert not grammar.accepts("<f>{}</f>")
    with pytest.raises(UnsupportedSchemaKeyword, match="maxLength"):
        of_kind(GrammarKind.STRUCTURAL_TAG, tag({"type": "string", "maxLength": 3}))
    with pytest.raises(InvalidGrammar):
        of_kind(GrammarKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": {"type": "none"}})


def test_a_json_object_is_any_object():
    grammar = acceptor(of_kind(GrammarKind.JSON_OBJECT, None))
    assert grammar.accepts('{"a":[1,{"b":null}]}')
    assert not any(map(grammar.accepts, ["[]", "1", '{"a":}']))
