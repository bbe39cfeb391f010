"""Values in all their forms: keys in any order, 1.0 for an integer, formats as annotations."""

import itertools
import json
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schemas import BYTES, END, acceptor, closed, compact, schema_spec

from plait.platform.errors import UnsupportedSchemaKeyword
from plait.structured.compiler import Compiler
from plait.structured.matcher import MatcherStore
from plait.structured.outline import route_outline
from plait.structured.router import explain, route
from plait.structured.schema import whole_numbers
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.tags import route_tag
from plait.structured.vocabulary import Vocabulary

DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
ANY = {"any_form": True}
MAIL = {"type": "string", "format": "email"}


def grammar(schema, **options):
    return acceptor(route(schema_spec(schema, options=ANY | options)))


def agrees(schema, texts, **options):
    """Of JSON texts, those that the grammar allows; it may allow those only that are valid."""
    found, judge = grammar(schema, **options), jsonschema.Draft202012Validator(schema)
    allowed = [text for text in texts if found.accepts(text)]
    assert all(judge.is_valid(json.loads(text)) for text in allowed), allowed
    return allowed


# --- the order of keys ---


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c", "d"], ["a", "b", "c", "d"]])
@pytest.mark.parametrize("is_open", [False, True])
def test_up_to_four_keys_come_in_any_order_each_once_and_none_that_is_due_is_missing(
    required, is_open
):
    schema = closed({name: {"type": "boolean"} for name in "abcd"}, required)
    if is_open:
        schema["additionalProperties"] = {"type": "null"}
    found = grammar(schema)
    for length in range(5):
        for names in itertools.permutations("abcd", length):
            text = compact(dict.fromkeys(names, True))
            assert found.accepts(text) == (set(required) <= set(names)), text
    for again in "abcd":
        members = ",".join(f'"{name}":true' for name in "abcd" + again)
        assert not found.accepts(f"{{{members}}}")


def test_free_keys_come_between_those_that_are_named():
    schema = closed({"a": {"type": "integer"}, "b": True}) | {"additionalProperties": MAIL}
    found = grammar(schema, assert_formats=True)
    for keys in itertools.permutations(["a", "b", "x", "ä\n"]):
        values = {"a": 1, "b": None, "x": "a@b.co", "ä\n": "c@d.co"}
        assert found.accepts(compact({key: values[key] for key in keys})), keys
    assert not found.accepts('{"x":"a@b.co","a":1}')
    assert not found.accepts('{"x":1,"a":1,"b":1}')
    assert not found.accepts(r'{"\u0061":"a@b.co","a":1,"b":1}')


def test_more_keys_come_in_the_schemas_order_with_their_values_in_any_form():
    schema = closed({name: {"type": "integer"} for name in "abcde"}, ["b"])
    texts = ['{"a":1.0,"b":2.0,"e":3}', '{"b":2}', '{"b":1,"a":1}', '{"a":1}', "{}"]
    assert agrees(schema, texts) == texts[:2]


def test_keys_of_patterns_are_told_apart_from_names_and_from_the_rest():
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "integer"}},
        "patternProperties": {"^a": {"type": "string"}},
        "additionalProperties": {"type": "boolean"},
    }
    schema["properties"]["ab"] = {"type": "string", "maxLength": 1}
    texts = ['{"ab":"x","ac":"long","z":true}', '{"z":true,"ac":"long","ab":"x"}', '{"z":false}']
    wrong = ['{"ab":"long"}', '{"ac":true}', '{"z":"x"}', '{"z":true,"ab":"xx"}']
    assert agrees(schema, texts + wrong) == texts


def test_whitespace_between_keys_is_that_of_the_request():
    schema = closed(
        {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}}
    )
    texts = ['{ "b" : [ 1.0 , 2 ] ,\n "a":1 }', '{"b":[],"a":1.0}']
    assert agrees(schema, texts, any_whitespace=True) == texts
    assert agrees(schema, texts) == texts[1:]
    assert agrees(schema, texts, whitespace_pattern=" ?") == texts[1:]
    assert agrees(schema, ['{"b": [1], "a": 1}'], whitespace_pattern=" ?")


# --- numbers ---

SPELLED = [
    f"{sign}{digits}{end}"
    for sign in ("", "-")
    for digits in ("0", "1", "2", "3", "6", "10", "12", "00", str(2**53), str(2**53 + 1), "9" * 400)
    for end in ("", ".0", ".5", ".00", "e0")
    if digits != "00"
]
WHOLE = [
    ({"type": "integer"}, {"1", "1.0", "-12.0", "0.0", str(2**53), "9" * 400}),
    ({"type": "integer", "minimum": 1, "maximum": 10}, {"1.0", "10.0", "3"}),
    ({"type": "integer", "exclusiveMinimum": 2}, {"3.0", "12.0"}),
    ({"type": "integer", "multipleOf": 3}, {"0.0", "12.0", "-6.0"}),
    ({"type": "integer", "multipleOf": 3, "maximum": 6}, {"6.0", "-6.0", "3"}),
    ({"type": "integer", "minimum": 2**53}, {str(2**53), str(2**53 + 1)}),
    ({"enum": [1, 2.0, 2.5, 2**53, "1", None]}, {"1.0", "2", "2.0", "2.5", f"{2**53}.0"}),
    ({"enum": [2**53 + 1, 1]}, {"1"}),
    ({"type": "integer", "enum": [1, 2.5, 10]}, {"1.0", "10.0"}),
    ({"const": -2.0}, {"-2", "-2.0"}),
    ({"not": {"const": 1}, "type": "integer", "minimum": 0, "maximum": 3}, {"0.0", "2.0", "3"}),
    ({"type": ["integer", "null"]}, {"3.0"}),
    ({"type": "number", "maximum": 3}, {"3.0", "-1.5"}),
]


@pytest.mark.parametrize(("schema", "some"), WHOLE)
def test_a_whole_number_may_end_in_a_zero_where_it_stays_the_same_number(schema, some):
    allowed = agrees(schema, [text for text in SPELLED if abs(float(text)) < 1e308])
    assert some - {"9" * 400} <= set(allowed)
    if schema == {"type": "integer"}:
        assert grammar(schema).accepts("9" * 400)
        assert not grammar(schema).accepts("9" * 400 + ".0")  # no double, so no integer to most


BOUNDS = st.none() | st.integers(-120, 120) | st.integers(-(10**6), 10**6)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(BOUNDS, BOUNDS, st.lists(st.integers(-(10**7), 10**7), max_size=8))
def test_whole_numbers_between_bounds_are_just_those(low, high, numbers):
    pattern = re.compile(whole_numbers.between(low, high) or "(?!)")
    near = [
        bound + step for bound in (low, high) if bound is not None for step in (-9, -1, 0, 1, 9)
    ]
    for number in (*numbers, *near, 0, 9, 10, 99, 100):
        inside = (low is None or low <= number) and (high is None or number <= high)
        assert (pattern.fullmatch(str(number)) is not None) == inside, (number, pattern)
    assert not any(pattern.fullmatch(text) for text in ("-0", "01", "", "+1"))


def test_a_whole_number_ends_in_a_zero_beside_other_numbers_too():
    other = {"type": "number", "minimum": 2.5, "multipleOf": 0.5}
    schema = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 7}, other]}
    texts = ["1.0", "2.0", "7.0", "2.5", "8.5", "8"]
    assert agrees(schema, [*texts, "0", "2.1", "1.5"]) == texts


def test_listed_lists_and_objects_take_all_forms_of_what_is_in_them():
    schema = {"enum": [[0, "a"], {"x": 1, "y": [2]}, [], {}]}
    texts = ['[0.0,"a"]', '{"y":[2.0],"x":1.0}', '{"x":1,"y":[2]}', "[]", "{}"]
    assert agrees(schema, [*texts, "[0.0]", '{"y":[2]}', '{"x":1,"y":[2],"x":1}']) == texts


def test_in_drafts_that_call_no_fraction_an_integer_none_is_written():
    for draft, allowed in (("draft-04", False), ("draft-07", True)):
        schema = {"$schema": f"http://json-schema.org/{draft}/schema#", "type": "integer"}
        assert grammar(schema).accepts("1.0") == allowed
        judge = jsonschema.validators.validator_for(schema)(schema)
        assert judge.is_valid(1.0) == allowed


# --- where the usual form stays ---


def test_lists_without_repetition_are_written_in_the_form_that_is_compared():
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    found = route(schema_spec(schema, options=ANY))
    assert found.checks
    assert not found.any_form
    assert not acceptor(found).accepts("[1,1.0]")


DEAD = {
    "anyOf": [
        {"type": "integer", "minimum": 2},
        {"type": "string", "pattern": "^.{2,3}$", "maxLength": 1},
        {"type": "object", "minProperties": 1, "maxProperties": 0},
        {
            "type": "object",
            "propertyNames": {"pattern": "^a"},
            "minProperties": 1,
            "maxProperties": 0,
        },
    ]
}


def test_a_part_that_nothing_fulfils_lets_nothing_through_and_costs_nothing_else():
    schema = {"type": "array", "items": DEAD}
    assert agrees(schema, ["[]", "[2]", "[{}]", '[""]', '["x"]']) == ["[]", "[2]"]
    vocabulary = Vocabulary(
        pieces=(*BYTES[:256], b""),
        special_ids=frozenset({END}),
        end_ids=(END,),
        width=257,
    )
    compiled = Compiler(vocabulary).compile(schema_spec(schema, options=ANY))
    matcher = MatcherStore().open(compiled, vocabulary)
    assert all(matcher.accept(byte) for byte in b"[2]")


def test_what_would_take_too_many_rules_is_written_in_one_form():
    names = {f"k{i}": {"properties": {"a": {"const": i}, "b": {}}} for i in range(900)}
    found = route(schema_spec(closed(names), options=ANY))
    assert not found.any_form


def test_without_another_form_to_write_the_backend_is_the_usual_one():
    schema = closed({"a": {"type": "string"}})
    assert route(schema_spec(schema, options=ANY)) == route(schema_spec(schema))


# --- who decides ---


@pytest.mark.parametrize(
    ("draft", "fields", "formats", "forms"),
    [
        (None, {}, True, False),
        ("http://json-schema.org/draft-07/schema#", {}, True, False),
        (DRAFT_2020, {}, False, True),
        ("https://json-schema.org/draft/2019-09/schema#", {}, False, True),
        ("https://example.org/draft/2020-12/schema", {}, True, False),
        (DRAFT_2020, {"strict": True}, True, False),
        (DRAFT_2020, {"options": {"assert_formats": True}}, True, True),
        (DRAFT_2020, {"options": {"any_form": False}}, False, False),
        (None, {"options": {"any_form": True, "assert_formats": False}}, False, True),
    ],
)
def test_a_schema_is_taken_by_the_letter_of_its_draft_unless_the_request_says_otherwise(
    draft, fields, formats, forms
):
    schema = closed({"m": MAIL, "n": {"type": "integer"}})
    schema |= {} if draft is None else {"$schema": draft}
    found = acceptor(route(schema_spec(schema, **fields)))
    assert found.accepts('{"m":"a@b.co","n":1}')
    assert found.accepts('{"m":"nobody","n":1}') != formats
    assert found.accepts('{"n":1,"m":"a@b.co"}') == forms
    assert found.accepts('{"m":"a@b.co","n":1.0}') == forms


def test_formats_that_no_backend_holds_are_refused_only_where_they_assert():
    schema = {"$schema": DRAFT_2020, "type": "string", "format": "idn-email"}
    found = route(schema_spec(schema))
    assert acceptor(found).accepts('"x"')
    assert any("'format' asserts nothing" in note for note in found.notes)
    with pytest.raises(UnsupportedSchemaKeyword):
        route(schema_spec(schema, options={"assert_formats": True}))
    (kind, of_format) = explain(schema_spec(schema))
    assert kind.asserts
    assert not of_format.asserts
    assert of_format.backend is None


def outline(schema, **content):
    spec = GrammarSpec(
        kind=GrammarKind.OUTLINE,
        content={"thinking": None, **content},
        options={"any_form": True, "assert_formats": False},
    )
    return acceptor(route_outline(spec))


def test_behind_thinking_the_form_is_the_requests_and_in_tools_the_narrow_one():
    schema = {"$schema": DRAFT_2020} | closed({"a": {"type": "integer"}, "m": MAIL})
    thinking = {"begun": True, "open": ["<t>"], "close": ["</t>"]}
    body = {"kind": "json_schema", "content": schema}
    answer = outline(schema, thinking=thinking, body=body)
    assert answer.accepts('so</t>{"m":"me","a":1.0}')
    marks = ("open", "before_name", "before_arguments", "after_arguments", "between", "close")
    tools = {
        "tools": [{"name": "f", "schema": schema, "strict": False, "param": "tools"}],
        "required": True,
        "several": False,
        "only_first": True,
        **{mark: [f"<{number}>"] for number, mark in enumerate(marks)},
    }
    call = outline(schema, body=tools)
    written = "<0><1>f<2>{}<3><5>".format
    assert call.accepts(written('{"a": 1, "m": "a@b.co"}'))
    for other in ('{"m": "a@b.co", "a": 1}', '{"a": 1.0, "m": "a@b.co"}', '{"a": 1, "m": "me"}'):
        assert not call.accepts(written(other)), other


def test_structural_tags_are_narrow_whatever_their_schemas_draft():
    schema = {"$schema": DRAFT_2020, "type": "string", "format": "email"}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "structural_tag", "format": content}
    with pytest.raises(UnsupportedSchemaKeyword, match="format"):
        route_tag(GrammarSpec(kind=GrammarKind.STRUCTURAL_TAG, content=tag))
