"""Regular expressions as JSON Schema means them (ECMA-262), read into a tree of exact parts.

The tree knows no anchors: `search` turns a pattern, which may match anywhere, into the language
of whole strings. What cannot be read exactly, such as back-references, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

MAX_CHAR = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]


class RegexError(ValueError):
    """A pattern that cannot be read, and where."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(f"{message} at offset {offset}")
        self.offset = offset


class Hashed:
    """A node whose hash is known: trees are looked up at every step of an automaton."""

    __slots__ = ("_hash",)
    _hash: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((type(self).__name__, self._key())))

    def __hash__(self) -> int:
        return self._hash

    def _key(self) -> object:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Chars(Hashed):
    """One character of a set of code points; the empty set matches nothing."""

    ranges: Ranges

    __hash__ = Hashed.__hash__

    def _key(self) -> object:
        return self.ranges


@dataclass(frozen=True, slots=True)
class Seq(Hashed):
    """Parts one after the other; no part is the empty string."""

    parts: tuple[Node, ...]

    __hash__ = Hashed.__hash__

    def _key(self) -> object:
        return self.parts


@dataclass(frozen=True, slots=True)
class Alt(Hashed):
    """One of several."""

    options: tuple[Node, ...]

    __hash__ = Hashed.__hash__

    def _key(self) -> object:
        return self.options


@dataclass(frozen=True, slots=True)
class Repeat(Hashed):
    """`node`, between `low` and `high` times; without end where `high` is None."""

    node: Node
    low: int
    high: int | None

    __hash__ = Hashed.__hash__

    def _key(self) -> object:
        return (self.node, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Edge:
    """`^` or `$`. This and all that follow are gone from the tree after `search`."""

    start: bool


@dataclass(frozen=True, slots=True)
class Border:
    r"""`\b` or, where it is not `wanted`, `\B`."""

    wanted: bool


@dataclass(frozen=True, slots=True)
class Look:
    """A look `ahead` or behind, at what must be there or, where not `wanted`, must not."""

    node: Node
    ahead: bool
    wanted: bool


Node = Chars | Seq | Alt | Repeat | Edge | Border | Look
EMPTY = Seq(())
NOTHING = Chars(())
ANY_CHAR = Chars(((0, MAX_CHAR),))
ANY = Repeat(ANY_CHAR, 0, None)


@lru_cache(maxsize=4096)
def union(*sets: Ranges) -> Ranges:
    """The code points of any of the sets, as sorted ranges with gaps between them."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=4096)
def common(one: Ranges, other: Ranges) -> Ranges:
    """The code points of both sets."""
    return complement(union(complement(one), complement(other)))


def points(text: str) -> Ranges:
    """The code points of some characters."""
    return union(*(((ord(c), ord(c)),) for c in text))


DIGIT: Ranges = ((48, 57),)
WORD = union(DIGIT, ((65, 90), (95, 95), (97, 122)))
SPACE = union(
    points("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"), ((0x2000, 0x200A),)
)
DOT = complement(points("\n\r\u2028\u2029"))
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
    if ranges := sets[0] if len(sets) == 1 else union(*sets):
        flat[Chars(ranges)] = None
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
def search(pattern: str) -> Node:
    """The language of all whole strings in which the pattern is found. Raises `RegexError`."""
    return _whole(pattern, ANY)


@lru_cache(maxsize=1024)
def fullmatch(pattern: str) -> Node:
    """The language of all strings that the pattern matches from end to end."""
    return _whole(pattern, EMPTY)


def _whole(pattern: str, around: Node) -> Node:
    from plait.structured.schema import regex_edges, regex_parser

    return regex_edges.whole(regex_parser.parse(pattern), before=around, after=around)


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
_SPELLED: Ranges = ((8, 10), (12, 13), (32, 126), (128, MAX_CHAR))


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


@lru_cache(maxsize=1024)
def is_unwritten(node: Node) -> bool:
    """Whether each string of the language has a character that routed JSON cannot spell."""
    return node != NOTHING and spelled(node) == NOTHING


def anchored(node: Node) -> str:
    """The node as a pattern of JSON strings, the same to those that search and those that match."""
    return f"^(?:{render(spelled(node))})$"
