"""The router: which backend for what, and what is told where a part of it is given."""

import pytest
from support.schemas import acceptor, closed, compact, schema_spec

from plait.structured.router import route


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
