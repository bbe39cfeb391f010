"""What text the masks of a schema let through: keys, lists, strings, white space."""

import jsonschema
import pytest
from support.schemas import acceptor, accepts, closed, compact, schema_spec

from plait.platform.errors import InvalidRegex
from plait.structured.router import route


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
