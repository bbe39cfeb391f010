"""Regular expressions as JSON Schema means them (ECMA-262), read into a tree of exact parts.

The tree knows no anchors: `search` turns a pattern, which may match anywhere, into the language
of whole strings. What cannot be read exactly (lookaround, back-references, word borders) is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

MAX_CHAR = 0x10FFFF
MAX_NODES = 20_000
MAX_REPEAT = 10_000
MAX_NESTING = 100

Ranges = tuple[tuple[int, int], ...]


class RegexError(ValueError):
    """A pattern that cannot be read, and where."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(f"{message} at offset {offset}")
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set of code points; the empty set matches nothing."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """Parts one after the other; no part is the empty string."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`node`, between `low` and `high` times; without end where `high` is None."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """`^` or `$`. Gone from the tree after `search`."""

    start: bool


Node = Chars | Seq | Alt | Repeat | Edge
EMPTY = Seq(())
NOTHING = Chars(())
ANY_CHAR = Chars(((0, MAX_CHAR),))
ANY = Repeat(ANY_CHAR, 0, None)


def union(*sets: Ranges) -> Ranges:
    """The code points of any of the sets, as sorted ranges with gaps between them."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """All other code points."""
    gaps, start = [], 0
    for low, high in ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= MAX_CHAR:
        gaps.append((start, MAX_CHAR))
    return tuple(gaps)


def common(one: Ranges, other: Ranges) -> Ranges:
    """The code points of both sets."""
    return complement(union(complement(one), complement(other)))


def _points(text: str) -> Ranges:
    return union(*(((ord(c), ord(c)),) for c in text))


DIGIT: Ranges = ((48, 57),)
WORD = union(DIGIT, ((65, 90), (95, 95), (97, 122)))
SPACE = union(
    _points("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), ((0x2000, 0x200A),)
)
DOT = complement(_points("\n\r\u2028\u2029"))
CLASSES = {
    "d": DIGIT,
    "D": complement(DIGIT),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(SPACE),
}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


def seq(parts: list[Node]) -> Node:
    """Parts in a row, flattened."""
    flat: list[Node] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Seq) else (part,))
    if NOTHING in flat:
        return NOTHING
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(options: list[Node]) -> Node:
    """One of the options, flattened; single characters become one set."""
    flat: dict[Node, None] = {}
    sets: list[Ranges] = []
    for option in options:
        for each in option.options if isinstance(option, Alt) else (option,):
            if isinstance(each, Chars):
                sets.append(each.ranges)
            else:
                flat[each] = None
    if union(*sets):
        flat[Chars(union(*sets))] = None
    if not flat:
        return NOTHING
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def repeat(node: Node, low: int, high: int | None) -> Node:
    """`node` repeated; trivial repetitions vanish."""
    if high == 0 or node == EMPTY:
        return EMPTY
    if node == NOTHING:
        return EMPTY if low == 0 else NOTHING
    return node if (low, high) == (1, 1) else Repeat(node, low, high)


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
        if any(isinstance(n, Edge) for n in walk(node)):
            raise self._error("a repeated anchor", start)
        self._take("?")  # laziness changes no language
        if self._peek("+") or self._peek("*") or self._peek("?"):
            raise self._error("a repeated repetition (possessive ones are not enforced)")
        return repeat(node, *bounds)

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
            return Chars(self._escape())
        self._at += 1
        if char in "^$":
            return Edge(char == "^")
        if char == ".":
            return Chars(DOT)
        if char in "*+?":
            raise self._error(f"nothing to repeat by {char!r}", self._at - 1)
        return Chars(_points(char))

    def _group(self) -> Node:
        start = self._at
        self._at += 1
        if self._take("?"):
            named = re.compile(r"P?<[A-Za-z_]\w*>").match(self._text, self._at)
            if named:
                self._at = named.end()
            elif not self._take(":"):
                kind = "lookaround" if self._text[self._at : self._at + 1] in "=!<" else "a flag"
                raise self._error(f"{kind}, which no backend enforces,", start)
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._error("groups nested too deep", start)
        node = self._alternatives()
        self._nesting -= 1
        if not self._take(")"):
            raise self._error("a '(' without its ')'", start)
        return node

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
            what = {"b": "a word border", "B": "a word border", "p": "a Unicode property"}
            raise self._error(
                f"{what.get(char, f'the escape {char!r}')}, which is not enforced,", start
            )
        return _points(char)

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
                    sets += [first, _points("-"), last]
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
        return _points(self._text[self._at - 1])


def walk(node: Node) -> Iterator[Node]:
    """The node and all below it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Seq):
            waiting.extend(node.parts)
        elif isinstance(node, Alt):
            waiting.extend(node.options)
        elif isinstance(node, Repeat):
            waiting.append(node.node)


@lru_cache(maxsize=1024)
def parse(pattern: str) -> Node:
    """Read a pattern; anchors stay in the tree. Raises `RegexError`."""
    return _Parser(pattern).parse()


@lru_cache(maxsize=1024)
def search(pattern: str) -> Node:
    """The language of all whole strings in which the pattern is found. Raises `RegexError`."""
    ahead, rest = _looking_ahead(pattern)
    if ahead:
        return _restricted(search(f"^{rest}"), ahead)
    return alt([_surrounded(parts, before=ANY, after=ANY) for parts in _spread(parse(pattern))])


@lru_cache(maxsize=1024)
def fullmatch(pattern: str) -> Node:
    """The language of all strings that the pattern matches from end to end."""
    return alt([_surrounded(parts, before=EMPTY, after=EMPTY) for parts in _spread(parse(pattern))])


def _looking_ahead(pattern: str) -> tuple[list[tuple[bool, str]], str]:
    """The lookaheads at the very start of a pattern, each wanted or not, and what follows them."""
    ahead, at = list[tuple[bool, str]](), 1
    while pattern[:1] == "^" and pattern[at : at + 3] in ("(?=", "(?!"):
        end = _group_end(pattern, at + 1)
        if end is None:
            break
        ahead.append((pattern[at + 2] == "=", pattern[at + 3 : end]))
        at = end + 1
    rest = pattern[at:]
    # Beside another option the lookahead would not hold for all.
    return (ahead, rest) if _group_end(rest + ")", 0, options=False) == len(rest) else ([], "")


def _group_end(pattern: str, at: int, *, options: bool = True) -> int | None:
    """Where the parenthesis closes that is open at `at`; None if nowhere, or behind an option."""
    depth, in_class = 1, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char == "|" and depth == 1 and not options:
            return None
        elif char in "()":
            depth += 1 if char == "(" else -1
            if depth == 0:
                return at
        at += 1
    return None


def _restricted(node: Node, ahead: list[tuple[bool, str]]) -> Node:
    """The strings of a language whose beginnings are, or are not, of others."""
    from plait.structured.schema import automata

    nodes: list[Node | None] = [node]
    for wanted, inner in ahead:
        found = search(f"^(?:{inner})")
        nodes.append(found if wanted else automata.complement(found))
    known = tuple(each for each in nodes if each is not None)
    joint = automata.intersection(known) if len(known) == len(nodes) else None
    if joint is None:
        raise RegexError("lookaround that takes too many words without", 1)
    return joint


def _spread(node: Node) -> list[list[Node]]:
    """Alternatives whose anchors, if any, stand at their own first and last places."""
    if isinstance(node, Alt):
        return [parts for option in node.options for parts in _spread(option)]
    parts: list[Node] = list(node.parts) if isinstance(node, Seq) else [node]
    for at in (0, len(parts) - 1):
        if parts and isinstance(parts[at], Alt) and _has_edge(parts[at]):
            options = parts[at].options  # type: ignore[union-attr]
            each = [seq([*parts[:at], option, *parts[at + 1 :]]) for option in options]
            return [found for one in each for found in _spread(one)]
    return [parts]


def _has_edge(node: Node) -> bool:
    return any(isinstance(n, Edge) for n in walk(node))


def _surrounded(parts: list[Node], *, before: Node, after: Node) -> Node:
    first, last = 0, len(parts)
    while first < last and parts[first] == Edge(True):
        first, before = first + 1, EMPTY
    while last > first and parts[last - 1] == Edge(False):
        last, after = last - 1, EMPTY
    inner = parts[first:last]
    if any(_has_edge(part) for part in inner):
        raise RegexError("an anchor in the middle, which is not enforced,", 0)
    return seq([before, *inner, after])


_SPECIAL = set(r"\.+*?()|[]{}^$-&~#/")


def _char(point: int, *, python: bool) -> str:
    char = chr(point)
    if char in _SPECIAL:
        return f"\\{char}" if char != "/" else char
    if 32 <= point < 127:
        return char
    if python:
        return f"\\U{point:08x}"
    return f"\\x{{{point:x}}}"


def _render_chars(ranges: Ranges, *, python: bool) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0], python=python)
    others = complement(ranges)
    sign, shown = ("^", others) if others and len(others) < len(ranges) else ("", ranges)
    body = "".join(
        _char(low, python=python)
        if low == high
        else f"{_char(low, python=python)}-{_char(high, python=python)}"
        for low, high in shown
    )
    return f"[{sign}{body}]"


def render(node: Node, *, python: bool = False) -> str:
    """The node as a pattern for whole strings, in the syntax common to our backends."""
    if isinstance(node, Chars):
        # An empty class is no syntax; this one matches nothing either.
        return _render_chars(node.ranges, python=python) if node.ranges else "[^\\s\\S]"
    if isinstance(node, Seq):
        return "".join(_grouped(part, python=python) for part in node.parts)
    if isinstance(node, Alt):
        return "|".join(render(option, python=python) for option in node.options)
    if isinstance(node, Repeat):
        inner = _grouped(node.node, python=python, atom=True)
        return inner + _render_bounds(node.low, node.high)
    raise AssertionError("anchors are gone by now")


def _grouped(node: Node, *, python: bool, atom: bool = False) -> str:
    text = render(node, python=python)
    wide = isinstance(node, Alt) or (atom and isinstance(node, Seq | Repeat))
    return f"(?:{text})" if wide else text


def _render_bounds(low: int, high: int | None) -> str:
    simple = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    if simple:
        return simple
    if low == high:
        return f"{{{low}}}"
    return f"{{{low},{'' if high is None else high}}}"


# Control characters have no other spelling than \u00…, which the routes forbid. They must also be
# gone from the sets: llguidance 1.9 lets \" and \\ through wherever a set holds all of 0 to 31.
_SPELLED: Ranges = ((8, 10), (12, 13), (32, MAX_CHAR))


def spelled(node: Node) -> Node:
    """The language without the characters that routed JSON cannot spell."""
    if isinstance(node, Chars):
        return Chars(common(node.ranges, _SPELLED))
    if isinstance(node, Seq):
        return seq([spelled(part) for part in node.parts])
    if isinstance(node, Alt):
        return alt([spelled(option) for option in node.options])
    assert isinstance(node, Repeat), "anchors are gone by now"
    return repeat(spelled(node.node), node.low, node.high)


def anchored(node: Node) -> str:
    """The node as a pattern of JSON strings, the same to those that search and those that match."""
    return f"^(?:{render(spelled(node))})$"
