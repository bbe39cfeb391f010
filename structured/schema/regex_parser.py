"""The reader of regular expressions' text; see `regex`."""

from __future__ import annotations

import re
from functools import lru_cache

from plait.structured.schema.regex import (
    CLASSES,
    CONTROLS,
    DOT,
    EMPTY,
    MAX_CHAR,
    Border,
    Chars,
    Edge,
    Look,
    Node,
    Ranges,
    RegexError,
    Repeat,
    alt,
    complement,
    points,
    repeat,
    seq,
    union,
)
from plait.structured.schema.regex_edges import has_edge, is_tempered

MAX_REPEAT = 10_000
MAX_UNROLLED = 4
MAX_NESTING = 100


@lru_cache(maxsize=1024)
def parse(pattern: str) -> Node:
    """Read a pattern; anchors and lookaround stay in the tree. Raises `RegexError`."""
    return _Parser(pattern).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._nesting = 0

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._error("an unmatched ')'")
        return node

    def _error(self, message: str, offset: int | None = None) -> RegexError:
        return RegexError(message, self._at if offset is None else offset)

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        found = self._peek(text)
        self._at += len(text) * found
        return found

    def _alternatives(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return alt(options)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and not self._peek("|") and not self._peek(")"):
            parts.append(self._quantified())
        return seq(parts)

    def _quantified(self) -> Node:
        start = self._at
        node = self._one()
        bounds = self._bounds()
        if bounds is None:
            return node
        self._take("?")  # laziness changes no language
        if self._peek("+") or self._peek("*") or self._peek("?"):
            raise self._error("a repeated repetition (possessive ones are not enforced)")
        if has_edge(node):
            return self._unrolled(node, *bounds, start)
        return repeat(node, *bounds)

    def _unrolled(self, node: Node, low: int, high: int | None, start: int) -> Node:
        """A repetition of what looks around: few are written out."""
        if is_tempered(node):
            return Repeat(node, low, high)
        if high is None or high > MAX_UNROLLED:
            raise self._error("a repeated anchor or lookaround", start)
        more: Node = EMPTY
        for _ in range(high - low):
            more = alt([EMPTY, seq([node, more])])
        return seq([*[node] * low, more])

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        found = re.compile(r"\{(\d+)(,(\d*))?\}").match(self._text, self._at)
        if not found:
            return None
        low = int(found[1])
        high = low if found[2] is None else int(found[3]) if found[3] else None
        if (high is not None and high < low) or max(low, high or 0) > MAX_REPEAT:
            raise self._error(f"a repetition beyond 0 to {MAX_REPEAT:,} or out of order")
        self._at = found.end()
        return low, high

    def _one(self) -> Node:
        char = self._text[self._at]
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._class())
        if char == "\\":
            return self._border() or Chars(self._escape())
        self._at += 1
        if char in "^$":
            return Edge(char == "^")
        if char == ".":
            return Chars(DOT)
        if char in "*+?":
            raise self._error(f"nothing to repeat by {char!r}", self._at - 1)
        return Chars(points(char))

    def _border(self) -> Node | None:
        if self._take("\\b"):
            return Border(True)
        return Border(False) if self._take("\\B") else None

    def _group(self) -> Node:
        start = self._at
        self._at += 1
        look: tuple[bool, bool] | None = None
        if self._take("?"):
            found = re.compile(r"(P?<[A-Za-z_]\w*>|:)|(<?)([=!])").match(self._text, self._at)
            if not found:
                raise self._error("a flag, which no backend enforces,", start)
            self._at = found.end()
            look = None if found[1] else (not found[2], found[3] == "=")
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._error("groups nested too deep", start)
        node = self._alternatives()
        self._nesting -= 1
        if not self._take(")"):
            raise self._error("a '(' without its ')'", start)
        return Look(node, *look) if look else node

    def _escape(self, *, in_class: bool = False) -> Ranges:
        start = self._at
        self._at += 1
        if self._at >= len(self._text):
            raise self._error("a trailing backslash", start)
        char = self._text[self._at]
        self._at += 1
        if char in CLASSES:
            return CLASSES[char]
        if char == "0" and self._text[self._at : self._at + 1].isdigit():
            raise self._error("an octal escape", start)
        if char in CONTROLS:
            return ((CONTROLS[char],) * 2,)
        if char == "b" and in_class:
            return ((8, 8),)
        if char in "xu":
            return self._coded(char, start)
        if char == "c" and re.match("[A-Za-z]", self._text[self._at : self._at + 1]):
            self._at += 1
            return ((ord(self._text[self._at - 1]) % 32,) * 2,)
        if char.isascii() and char.isalnum():
            names = {"p": "a Unicode property", "P": "a Unicode property", "k": "a back-reference"}
            escape = "a back-reference" if char.isdigit() else f"the escape {char!r}"
            raise self._error(f"{names.get(char, escape)}, which is not enforced,", start)
        return points(char)

    def _coded(self, char: str, start: int) -> Ranges:
        digits = rf"[0-9a-fA-F]{{{2 if char == 'x' else 4}}}|\{{[0-9a-fA-F]{{1,6}}\}}"
        found = re.compile(digits).match(self._text, self._at)
        if not found:
            raise self._error(f"a malformed \\{char} escape", start)
        self._at = found.end()
        point = int(found[0].strip("{}"), 16)
        if 0xD800 <= point < 0xDC00:
            low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._at)
            if low:
                self._at = low.end()
                point = 0x10000 + (point - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if point > MAX_CHAR or 0xD800 <= point <= 0xDFFF:
            raise self._error("no Unicode character", start)
        return ((point, point),)

    def _class(self) -> Ranges:
        start = self._at
        self._at += 1
        negated = self._take("^")
        sets: list[Ranges] = []
        while not self._take("]"):
            if self._at >= len(self._text):
                raise self._error("a '[' without its ']'", start)
            first = self._member()
            if self._peek("-") and not self._peek("-]") and self._at + 1 < len(self._text):
                self._at += 1
                last = self._member()
                if len(first) != 1 or len(last) != 1 or first[0][0] != first[0][1]:
                    # A class such as \w cannot bound a range: the hyphen stands for itself.
                    sets += [first, points("-"), last]
                    continue
                if last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                    raise self._error("a range out of order", start)
                first = ((first[0][0], last[0][0]),)
            sets.append(first)
        ranges = union(*sets)
        return complement(ranges) if negated else ranges

    def _member(self) -> Ranges:
        if self._text[self._at] == "\\":
            return self._escape(in_class=True)
        self._at += 1
        return points(self._text[self._at - 1])
