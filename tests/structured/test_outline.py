"""Whole replies under one grammar: whatever the masks let through reads back as it should."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from support.grammars import END, OTHER_END, SPECIAL, allowed, bits, greedy, vocabulary

from plait.platform.errors import BadRequest, Unsupported
from plait.structured.compiler import Compiler
from plait.structured.matcher import Matcher, MatcherStore
from plait.structured.outline import pieces, tools_body
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.thinking import CLOSE, OPEN
from plait.structured.tools import formats
from plait.structured.tools.parser import Reply, ReplyParser
from plait.structured.tools.request import read_tools

CITY = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": ["ab", 1, None]}},
    "required": ["b"],
}
CLOCK = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "city", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock"}},
]
SCHEMAS = {"city": CITY, "clock": CLOCK}
ENDS = (END, OTHER_END)
ALL = (formats.HERMES, formats.LLAMA, formats.MISTRAL, formats.MISTRAL_ARGS)
# In one case the marks are text; in the other the first of them is a token.
TOKENS: tuple[dict[str, int], ...] = ({}, {"[TOOL_CALLS]": SPECIAL, CLOSE: SPECIAL})


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(vocabulary())


def outline(form, tokens, *, begins=False, answer=None, **wishes):
    thinking = None
    if begins is not False:
        marks = [pieces(mark, tokens) for mark in (OPEN, CLOSE)]
        thinking = {"begun": bool(begins), "open": marks[0], "close": marks[1]}
    body = tools_body(read_tools(TOOLS, **wishes), form, tokens)
    return {"thinking": thinking, "body": body, "answer": answer}


def opened(compiler: Compiler, content) -> Matcher:
    spec = GrammarSpec(kind=GrammarKind.OUTLINE, content=content, param="tools")
    return MatcherStore().open(compiler.compile(spec), vocabulary())


def shown(tokens: list[int], special: dict[str, int]) -> str:
    """The text of a reply, special tokens by their marks."""
    names = {token: mark.encode() for mark, token in special.items()}
    found = b"".join(names.get(t, vocabulary().pieces[t]) for t in tokens if t not in ENDS)
    return found.decode(errors="replace")


def walk(matcher: Matcher, seed: int, most: int = 400) -> tuple[list[int], bool]:
    """Random legal tokens; those that end JSON or the reply are preferred, or none would end."""
    chance, tokens = random.Random(seed), []
    while len(tokens) < most:
        row = np.zeros(vocabulary().num_words, np.int32)
        legal = sorted(bits(row)) if matcher.fill(row) else list(range(256))
        closing = [
            t for t in legal if t in ENDS or vocabulary().pieces[t][:1] in (b'"', b"}", b"<")
        ]
        pool = closing if closing and chance.random() < 0.6 else legal
        token = chance.choice(pool)
        assert matcher.accept(token)
        tokens.append(token)
        if token in ENDS:
            return tokens, True
    return tokens, False


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
@pytest.mark.parametrize("tokens", TOKENS, ids=["text", "token"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_random_replies_are_text_or_calls_that_fit_their_schemas(compiler, form, tokens, choice):
    special = {mark: token for mark, token in tokens.items() if mark in form.tokens}
    first = opened(compiler, outline(form, special, choice=choice, parallel=None))
    num_ended = 0
    for seed in range(12):
        ids, ended = walk(first.copy(), seed)
        parser, reply = ReplyParser(form), Reply()
        for delta in (*parser.feed(shown(ids, special)), *parser.end()):
            reply.add(delta)
        assert not parser.broken
        if not ended:
            continue
        num_ended += 1
        assert choice == "auto" or reply.calls
        assert not (choice == "required" and reply.content)
        for call in reply.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert num_ended


def accepts(matcher: Matcher, *parts: str | int) -> bool:
    for part in parts:
        for token in [part] if isinstance(part, int) else greedy(part):
            if not matcher.accept(token):
                return False
    return END in allowed(matcher)


CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]} | {
    "additionalProperties": False
}
AS_SCHEMA = {"kind": "json_schema", "content": ONE}


@pytest.mark.parametrize("begins", [True, None])
@pytest.mark.parametrize("tokens", TOKENS, ids=["text", "token"])
def test_thinking_is_free_and_what_follows_is_held(compiler, begins, tokens):
    close = tokens.get(CLOSE, CLOSE)
    start = [] if begins else [OPEN]
    special = {mark: token for mark, token in tokens.items() if mark == CLOSE}

    def ok(content, *parts):
        return accepts(opened(compiler, content), *start, *parts)

    required = outline(formats.HERMES, special, begins=begins, choice="required")
    assert ok(required, "so <tool_call> or \n{", close, "\n\n", CALL)
    assert ok(required, close, CALL)
    assert not ok(required, "so", close, "no call")
    assert not ok(required, "never closed")
    for kind, content, good, bad in (
        ("json_schema", ONE, '{"a":1}', '{"a":2}'),
        ("regex", "a/b+", "a/bb", "a/"),
        ("choice", ["yes", "no"], "no", "maybe"),
    ):
        held = {
            "thinking": required["thinking"],
            "body": {"kind": kind, "content": content},
        }
        assert ok(held, "hm", close, "\n", good), kind
        assert not ok(held, "hm", close, bad), kind
        assert accepts(opened(compiler, held), good) is (begins is None)


def test_beside_tools_an_answer_that_is_no_call_obeys_the_constraint(compiler):
    content = outline(formats.HERMES, {}, answer=AS_SCHEMA)
    assert accepts(opened(compiler, content), CALL)
    assert accepts(opened(compiler, content), '{"a":1}')
    assert not accepts(opened(compiler, content), "free text")


def test_one_call_ends_the_reply_where_several_are_not_wanted(compiler):
    content = outline(formats.HERMES, {}, choice="required", parallel=False)
    matcher = opened(compiler, content)
    assert accepts(matcher, CALL)
    assert matcher.finished
    several = opened(compiler, outline(formats.HERMES, {}, choice="required"))
    assert accepts(several, CALL, "\n" + CALL)


def test_special_tokens_are_never_text(compiler):
    matcher = opened(compiler, outline(formats.HERMES, {}))
    assert SPECIAL not in allowed(matcher)
    assert accepts(matcher, "a")
    assert SPECIAL not in allowed(matcher)


def test_grammars_behind_thinking_are_refused_by_name(compiler):
    content = outline(formats.HERMES, {}, begins=True)
    content["body"] = {"kind": "grammar", "content": 'root ::= "a"'}
    with pytest.raises(Unsupported, match="thinks first"):
        opened(compiler, content)


def test_unique_items_of_arguments_are_told_or_refused_never_dropped(compiler):
    unique = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": unique}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}

    def compiled(strict):
        tool["function"]["strict"] = strict
        if strict:
            schema.update(required=["a"], additionalProperties=False)
        body = tools_body(read_tools([tool]), formats.HERMES, {})
        content = {"thinking": None, "body": body}
        spec = GrammarSpec(kind=GrammarKind.OUTLINE, content=content, param="tools")
        return compiler.compile(spec)

    (note,) = compiled(strict=False).notes
    assert "uniqueItems" in note
    with pytest.raises(BadRequest) as refusal:
        compiled(strict=True)
    assert refusal.value.param == "tools[0].function.parameters"
