"""One grammar over a whole reply: thinking, then tool calls or what a constraint says.

Written as a grammar of llguidance's, in which each schema is one rule, and marks that are single
special tokens are named by their ids. Nothing is switched on at a border: free text is a part of
the grammar, and excludes what would begin another.

Content: {"thinking": null or {"begun": bool, "open": PIECES, "close": PIECES},
          "body": {"kind": a GrammarKind, "content": …}, or what `tools_body` gives,
          "answer": beside tools, what a reply without a call obeys, as {"kind": …}, or absent}
PIECES are texts and token ids in a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plait.platform.errors import BadRequest, GrammarTooComplex, InvalidRegex, Unsupported
from plait.structured import forms
from plait.structured.backends.llguidance import json_text
from plait.structured.forms import quoted, slashed
from plait.structured.router import (
    MAX_TEXT_BYTES,
    Route,
    by_llguidance,
    check_choices,
    llguidance_error,
    refused,
)
from plait.structured.schema import regex, whitespace
from plait.structured.schema.meaning import NARROW_OPTIONS
from plait.structured.schema.normalise import Normalised, normalise
from plait.structured.spec import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from plait.structured.tools.formats import ToolFormat
    from plait.structured.tools.request import ToolWish

MAX_CALLS = 64  # in one reply; an endless row of calls would run to the limit of tokens
MAX_TOOLS_BYTES = 512 * 1024  # of all tools' schemas together
_ANY = "/(?s:.*)/"
# As Python's json writes it, which models are trained on; exact, so that it can be forced.
_SPACED = {"item_separator": ", ", "key_separator": ": "}

Pieces = list[str | int]


def pieces(text: str, tokens: Mapping[str, int]) -> Pieces:
    """A text with the marks in it that are special tokens as their ids."""
    found: Pieces = []
    marks = sorted(tokens, key=len, reverse=True)
    pattern = "|".join(map(re.escape, marks)) if marks else "(?!)"
    at = 0
    for match in re.finditer(pattern, text):
        if match.start() > at:
            found.append(text[at : match.start()])
        found.append(tokens[match[0]])
        at = match.end()
    if at < len(text):
        found.append(text[at:])
    return found


def tools_body(wish: ToolWish, form: ToolFormat, tokens: Mapping[str, int]) -> dict[str, Any]:
    """The part of an outline that is tool calls. `tokens` are ids of special tokens by text."""
    special = {text: tokens[text] for text in form.tokens if text in tokens}
    return {
        "tools": [
            {"name": t.name, "schema": t.parameters, "strict": t.strict, "param": t.param}
            for t in wish.callable
        ],
        "required": wish.required,
        "several": wish.parallel and not form.one_call,
        "only_first": form.only_first,
        "open": pieces(form.open, special),
        "before_name": pieces(form.before_name, special),
        "before_arguments": pieces(form.before_arguments, special),
        "after_arguments": pieces(form.after_arguments, special),
        "between": pieces(form.between, special),
        "close": pieces(form.close, special),
    }


def route_outline(spec: GrammarSpec) -> Route:
    """The grammar of a whole reply. Raises what cannot be enforced."""
    notes: list[str] = []
    content = spec.content
    body, rules = _body(content, spec, notes)
    thinking = content["thinking"]
    start = body
    if thinking is not None:
        start, more = _thinking(thinking, body)
        rules += more
    return Route(
        backend="llguidance",
        kind=GrammarKind.OUTLINE,
        content="\n".join([f"start: {start}", *rules]),
        notes=tuple(notes),
    )


def _thinking(thinking: dict[str, Any], body: str) -> tuple[str, list[str]]:
    """Thinking ends at the first closing mark; up to two line breaks behind it are no answer."""
    close = thinking["close"]
    rules = ["THOUGHT: " + _up_to(_without(close), close) + " /\\n{0,2}/"]
    thought = "THOUGHT"
    if isinstance(close[0], int):
        rules = [f"THOUGHT: {_ANY}", "BREAKS: /\\n{1,2}/"]
        thought = f"THOUGHT {_literal(close)} BREAKS?"
    if thinking["begun"]:
        return f"{thought} ({body})", rules
    return f"({_literal(thinking['open'])} {thought})? ({body})", rules


def _body(content: dict[str, Any], spec: GrammarSpec, notes: list[str]) -> tuple[str, list[str]]:
    """What may come behind thinking, and the rules it names."""
    body, thinking = content["body"], content["thinking"]
    if "tools" not in body:
        return _answer(body, spec, notes)
    calls, rules = _calls(body, spec, notes)
    if body["required"]:
        return calls, rules
    if content.get("answer") is not None:
        answer, more = _answer(content["answer"], spec, notes)
        return f"{calls} | {answer}", [*rules, *more]
    begins = thinking["open"] if thinking is not None and not thinking["begun"] else None
    start, more = _calls_or_text(body, calls, begins)
    return start, [*rules, *more]


def _answer(body: dict[str, Any], spec: GrammarSpec, notes: list[str]) -> tuple[str, list[str]]:
    """The rule of what a constraint says, and those that it names."""
    inner = replace(spec, kind=GrammarKind(body["kind"]), content=body["content"])
    match inner.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            is_any = inner.kind is GrammarKind.JSON_OBJECT
            schema = {"type": "object"} if is_any else inner.content
            spaces = whitespace.read(inner)
            options = whitespace.for_llguidance(spaces)
            found = _normalised(schema, inner)
            notes += [*found.notes, *spaces.notes]
            rules = forms.of(found, options, start="answer") if found.meaning.any_form else None
            if rules and not llguidance_error("\n".join(["start: answer", *rules])):
                return "answer", rules
            route = _json(found, inner, options)
            return "answer", [f"answer: %json {json_text(route.content, route.options)}"]
        case GrammarKind.REGEX:
            return "ANSWER", [f"ANSWER: {_pattern(inner)}"]
        case GrammarKind.CHOICE:
            check_choices(inner)
            return "answer", ["answer: " + " | ".join(quoted(each) for each in inner.content)]
    raise Unsupported(
        f"{inner.kind} together with tools, or for a model that thinks first, is not served. Use a "
        "JSON schema, a regex or a choice; or leave tools out and turn thinking off "
        '(chat_template_kwargs: {"enable_thinking": false}, where the template reads it)',
        param=spec.param,
    )


def _pattern(spec: GrammarSpec) -> str:
    text = spec.content
    if not isinstance(text, str) or not text:
        raise InvalidRegex("a text that is not empty is needed", param=spec.param)
    if len(text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise GrammarTooComplex(f"{MAX_TEXT_BYTES:,} bytes are the limit", param=spec.param)
    try:
        node = regex.fullmatch(text)
    except regex.RegexError as error:
        message = f"the regular expression has {error}; write it without"
        raise InvalidRegex(message, param=spec.param) from None
    if node == regex.NOTHING:
        raise InvalidRegex("the regular expression matches nothing", param=spec.param)
    return slashed(regex.render(node))


# --- tools ---


def _calls(body: dict[str, Any], spec: GrammarSpec, notes: list[str]) -> tuple[str, list[str]]:
    """One call or several, as they stand in a reply."""
    num_bytes = sum(len(json.dumps(tool["schema"])) for tool in body["tools"])
    if num_bytes > MAX_TOOLS_BYTES:
        raise GrammarTooComplex(
            f"the tools' schemas have {num_bytes:,} bytes; {MAX_TOOLS_BYTES:,} are the limit",
            param="tools",
        )
    more = f"({_literal(body['between'])} call){{0,{MAX_CALLS - 1}}}" if body["several"] else ""
    rules = [
        *(_call(i, tool, body, spec, notes) for i, tool in enumerate(body["tools"])),
        "call: " + " | ".join(f"call_{i}" for i in range(len(body["tools"]))),
        f"calls: {_literal(body['before_name'])} call {more} {_literal(body['close'])}",
    ]
    return f"{_literal(body['open'])} calls", rules


def _calls_or_text(
    body: dict[str, Any], calls: str, begins: Pieces | None
) -> tuple[str, list[str]]:
    """Text without a call, or calls behind text where the format lets them stand there."""
    free = _free(body, begins)
    if body["only_first"]:
        return f"{calls} | FREE", [f"FREE: {free}"]
    if isinstance(body["open"][0], int):
        return f"FREE ({calls})?", [f"FREE: {free}"]
    return "FREE | UP_TO calls", [f"FREE: {free}", "UP_TO: " + _up_to(free, body["open"])]


def _free(body: dict[str, Any], begins: Pieces | None) -> str:
    """Text in which no call begins, and which does not begin as thinking does."""
    text = _starting_without(body["open"]) if body["only_first"] else _without(body["open"])
    if begins and isinstance(begins[0], str):
        text += f" & ~/{_escaped(begins[0])}(?s:.*)/"
    return text


def _call(
    number: int, tool: dict[str, Any], body: dict[str, Any], spec: GrammarSpec, notes: list[str]
) -> str:
    route = _arguments(tool, spec, notes)
    schema = json_text(route.content, route.options)
    before, after = _literal(body["before_arguments"]), _literal(body["after_arguments"])
    return f"call_{number}: {quoted(tool['name'])} {before} %json {schema} {after}"


def _arguments(tool: dict[str, Any], spec: GrammarSpec, notes: list[str]) -> Route:
    """By the tool's schema; any object where that cannot be enforced and need not be."""
    inner = replace(
        spec,
        kind=GrammarKind.JSON_SCHEMA,
        content=tool["schema"],
        param=tool["param"],
        strict=tool["strict"],
        options=NARROW_OPTIONS,
    )
    options = whitespace.for_llguidance(whitespace.Whitespace(False)) | _SPACED
    try:
        return _json(_normalised(tool["schema"], inner), inner, options)
    except BadRequest as error:
        if tool["strict"]:
            raise
        notes.append(
            f"tool {tool['name']!r}: its arguments are held to being an object only, not to its "
            f"schema. {error.message}"
        )
        return _json(_normalised({"type": "object"}, inner), inner, options)


def _normalised(schema: Any, spec: GrammarSpec) -> Normalised:
    found = normalise(schema, spec)
    if found.refusals:
        raise refused(found.refusals[0], spec.param)
    assert not found.checks, "what is kept beside a grammar is refused inside of another"
    return found


def _json(found: Normalised, spec: GrammarSpec, options: dict[str, Any]) -> Route:
    return by_llguidance(found, spec, options)


# --- words of the grammar ---


def _literal(parts: Sequence[str | int]) -> str:
    return " ".join(f"<[{p}]>" if isinstance(p, int) else quoted(p) for p in parts)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "\\n")


def _without(mark: Pieces) -> str:
    """Any text in front of a mark. Special tokens are no text, so nothing else need be said."""
    if isinstance(mark[0], int):
        return _ANY
    return f"{_ANY} & ~/(?s:.*){_escaped(mark[0])}(?s:.*)/"


def _up_to(text: str, mark: Pieces) -> str:
    """One terminal of text and the mark behind it; of two, the first would swallow the mark."""
    return f"({text}) {_literal(mark)}"


def _starting_without(mark: Pieces) -> str:
    if isinstance(mark[0], int):
        return _ANY
    return f"{_ANY} & ~/{_escaped(mark[0])}(?s:.*)/"
