"""Whether every rule of a Lark grammar leads to an end.

llguidance does not ask, and an answer that enters a rule without one could only be cut off. What
is read here is just enough of the language for that; of a text that is beyond it nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
    (?P<skip> \s+ | //[^\n]* | \#[^\n]* )
  | (?P<text> "(?:\\.|[^"\\\n])*" i? | /(?:\\.|[^/\\\n])+/ [a-z]* | <[^>\n]*> )
  | (?P<json> %(?:json|regex|lark|llguidance|grammar) \s* (?=\{) )
  | (?P<drop> %(?:import|ignore|declare|override) [^\n]* )
  | (?P<count> \{ \s* (?P<low>\d*) \s* (?:, \s* \d* \s*)? \} | ~ \s* (?P<least>\d+) (?:\.\.\d+)? )
  | (?P<name> [A-Za-z_]\w* )
  | (?P<mark> -> | \.\. | [()\[\]|:?*+!,.=] )
    """,
    re.VERBOSE,
)
_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_LEAF = "<leaf>"
_MAX_TOKENS = 20_000
_MAX_DEPTH = 100


class _Beyond(Exception):
    """The text is beyond what is read here."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a rule needs: of some alternatives one, each of them a list of parts, all of which."""

    alternatives: list[list[str | _Rule]] = field(default_factory=list)

    def ends(self, known: Mapping[str, bool]) -> bool:
        return any(all(_ends(part, known) for part in each) for each in self.alternatives)

    def names(self) -> set[str]:
        parts = [part for each in self.alternatives for part in each]
        found = {part for part in parts if isinstance(part, str)}
        return found.union(*(part.names() for part in parts if isinstance(part, _Rule)))


def endless_rule(text: str) -> str | None:
    """A rule that `start` leads to and that never ends; None where there is none, or unknown."""
    try:
        rules = _Reader(_tokens(text)).rules()
    except _Beyond:
        return None
    known = dict.fromkeys(rules, False)
    while found := [n for n, rule in rules.items() if not known[n] and rule.ends(known)]:
        known.update(dict.fromkeys(found, True))
    endless = [name for name in _reached(rules) if not known.get(name, True)]
    at_fault = [name for name in endless if name in rules[name].names()]
    return next(iter(at_fault + endless), None)


def _reached(rules: Mapping[str, _Rule]) -> list[str]:
    found = ["start"]
    for name in found:
        more = rules[name].names() & rules.keys() if name in rules else set()
        found += sorted(more.difference(found))
    return found


def _ends(part: str | _Rule, known: Mapping[str, bool]) -> bool:
    """What is no rule of the grammar is a text, or a terminal of the library's own."""
    return known.get(part, True) if isinstance(part, str) else part.ends(known)


def _tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token; the low end of a count as its text."""
    found: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(found) > _MAX_TOKENS:
            raise _Beyond
        at = match.end()
        kind = match.lastgroup or ""
        if match["json"]:
            at = _after_braces(text, at)
            if "llguidance" not in match["json"]:
                found.append(("text", _LEAF))
        elif match["count"]:
            found.append(("count", match["low"] or match["least"] or "0"))
        elif kind in ("text", "name", "mark"):
            found.append((kind, match[0] if kind != "text" else _LEAF))
    return found


def _after_braces(text: str, at: int) -> int:
    depth = 0
    while at < len(text):
        if text[at] == '"':
            string = _STRING.match(text, at)
            if string is None:
                break
            at = string.end()
            continue
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at
    raise _Beyond


class _Reader:
    """Rules of a list of tokens."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Rule]:
        found: dict[str, _Rule] = {}
        while self._at < len(self._tokens):
            if not self._begins_rule():
                raise _Beyond
            while self._peek() in ("!", "?"):
                self._at += 1
            name = self._next()
            while self._next() != ":":  # attributes of the rule
                pass
            found[name] = self._alternatives()
        return found

    def _begins_rule(self) -> bool:
        at = self._at
        while self._text(at) in ("!", "?"):
            at += 1
        if self._kind(at) != "name":
            return False
        at += 1
        if self._text(at) == ".":  # a priority would follow, which is no token here
            return False
        if self._text(at) == "[":
            while self._text(at) not in ("]", ""):
                at += 1
            at += 1
        return self._text(at) == ":" and self._text(at + 1) != ":"

    def _alternatives(self) -> _Rule:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _Beyond
        rule = _Rule([[]])
        while self._at < len(self._tokens) and self._peek() not in (")", "]"):
            if self._peek() == "|":
                self._at += 1
                rule.alternatives.append([])
            elif self._begins_rule():
                break
            else:
                rule.alternatives[-1] += self._item()
        self._depth -= 1
        return rule

    def _item(self) -> list[str | _Rule]:
        kind, text = self._kind(self._at), self._next()
        if text == "->":
            self._next()
            return []
        part: str | _Rule = text
        if text in ("(", "["):
            part = self._alternatives()
            closing = self._next()
            if closing != (")" if text == "(" else "]"):
                raise _Beyond
        elif kind not in ("text", "name"):
            raise _Beyond
        optional = text == "["
        while self._peek() in ("?", "*", "+") or self._kind(self._at) == "count":
            optional |= self._peek() in ("?", "*") or self._peek().strip("0") == ""
            self._at += 1
        if self._peek() == "..":
            self._at += 2
        return [] if optional else [part]

    def _peek(self) -> str:
        return self._text(self._at)

    def _text(self, at: int) -> str:
        return self._tokens[at][1] if at < len(self._tokens) else ""

    def _kind(self, at: int) -> str:
        return self._tokens[at][0] if at < len(self._tokens) else ""

    def _next(self) -> str:
        if self._at >= len(self._tokens):
            raise _Beyond
        self._at += 1
        return self._tokens[self._at - 1][1]
