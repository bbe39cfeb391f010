"""Grammars that are no schema: choices, regular expressions, EBNF and Lark, structural tags."""

import pytest
from support.schemas import acceptor, closed

from plait.platform.errors import InvalidGrammar, InvalidRegex, UnsupportedSchemaKeyword
from plait.structured.router import route
from plait.structured.spec import GrammarKind, GrammarSpec


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
