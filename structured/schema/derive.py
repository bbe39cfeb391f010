"""Questions about regular languages, answered by derivatives: no backtracking, bounded work."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from plait.structured.schema.regex import (
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Node,
    Ranges,
    Repeat,
    Seq,
    alt,
    complement,
    repeat,
    seq,
    walk,
)

MAX_STATES = 300


class TooManyStates(Exception):
    """The question would cost more than it may."""


@lru_cache(maxsize=4096)
def nullable(node: Node) -> bool:
    """Whether the language holds the empty string."""
    if isinstance(node, Seq):
        return all(map(nullable, node.parts))
    if isinstance(node, Alt):
        return any(map(nullable, node.options))
    return isinstance(node, Repeat) and (node.low == 0 or nullable(node.node))


@lru_cache(maxsize=16384)
def derivative(node: Node, point: int) -> Node:
    """What may follow after the character `point`."""
    if isinstance(node, Chars):
        return EMPTY if any(low <= point <= high for low, high in node.ranges) else NOTHING
    if isinstance(node, Alt):
        return alt([derivative(option, point) for option in node.options])
    if isinstance(node, Repeat):
        high = None if node.high is None else node.high - 1
        rest = repeat(node.node, max(0, node.low - 1), high)
        return seq([derivative(node.node, point), rest])
    assert isinstance(node, Seq), "anchors are gone by now"
    options = []
    for at, part in enumerate(node.parts):
        options.append(seq([derivative(part, point), *node.parts[at + 1 :]]))
        if not nullable(part):
            break
    return alt(options)


@lru_cache(maxsize=16384)
def matches(node: Node, text: str) -> bool:
    """Whether the whole text is in the language."""
    for char in text:
        node = derivative(node, ord(char))
        if node == NOTHING:
            return False
    return nullable(node)


def representatives(nodes: Iterable[Node]) -> list[int]:
    """One code point of each class of characters that the nodes cannot tell apart."""
    return sorted(frozenset({0}).union(*map(_starts, nodes)))


def next_points(nodes: Iterable[Node]) -> list[int]:
    """As `representatives`, of characters that no node tells apart as the very next one."""
    return sorted(frozenset({0}).union(*map(_next_starts, nodes)))


@lru_cache(maxsize=16384)
def _next_starts(node: Node) -> frozenset[int]:
    if isinstance(node, Chars):
        return _starts(node)
    if isinstance(node, Alt):
        return frozenset[int]().union(*map(_next_starts, node.options))
    if isinstance(node, Repeat):
        return _next_starts(node.node)
    assert isinstance(node, Seq), "anchors are gone by now"
    found = frozenset[int]()
    for part in node.parts:
        found |= _next_starts(part)
        if not nullable(part):
            break
    return found


@lru_cache(maxsize=4096)
def _starts(node: Node) -> frozenset[int]:
    """Where the character sets of a node begin, and where they have ended."""
    starts: set[int] = set()
    for ranges in {n.ranges for n in walk(node) if isinstance(n, Chars)}:
        starts |= {low for low, _ in ranges} | {low for low, _ in complement(ranges)}
    return frozenset(starts)


@lru_cache(maxsize=4096)
def disjoint(one: Node, other: Node) -> bool:
    """Whether no string is in both languages; False also where that is too dear to tell."""
    points = representatives((one, other))
    waiting, seen = [(one, other)], {(one, other)}
    while waiting:
        left, right = waiting.pop()
        if nullable(left) and nullable(right):
            return False
        for point in points:
            pair = (derivative(left, point), derivative(right, point))
            if NOTHING not in pair and pair not in seen:
                seen.add(pair)
                waiting.append(pair)
        if len(seen) > MAX_STATES:
            return False
    return True


def without(strings: Iterable[str]) -> Node:
    """All strings but these, as a tree of their common beginnings."""
    texts = set(strings)
    by_first: dict[int, set[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(ord(text[0]), set()).add(text[1:])
    listed: Ranges = tuple((point, point) for point in sorted(by_first))
    options: list[Node] = [] if "" in texts else [EMPTY]
    options.append(seq([Chars(complement(_merged(listed))), repeat(_ANY_CHAR, 0, None)]))
    options += [seq([Chars(((point, point),)), without(rest)]) for point, rest in by_first.items()]
    return alt(options)


def _merged(ranges: Ranges) -> Ranges:
    from plait.structured.schema.regex import union

    return union(ranges)


_ANY_CHAR = Chars(((0, 0x10FFFF),))
