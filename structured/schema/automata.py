"""Complements and intersections of regular languages, as trees again, where they are small."""

from __future__ import annotations

from functools import lru_cache

from plait.structured.schema.derive import derivative, nullable, representatives
from plait.structured.schema.regex import (
    EMPTY,
    MAX_CHAR,
    NOTHING,
    Chars,
    Node,
    Ranges,
    alt,
    repeat,
    seq,
    union,
    walk,
)

MAX_STATES = 80
MAX_NODES = 6_000

State = tuple[Node, ...]


@lru_cache(maxsize=256)
def complement(node: Node) -> Node | None:
    """All strings that are not in the language; None where that takes too many words."""
    return _language((node,), negate=True)


@lru_cache(maxsize=256)
def intersection(nodes: tuple[Node, ...]) -> Node | None:
    """The strings in all the languages; None where that takes too many words."""
    return nodes[0] if len(nodes) == 1 else _language(nodes, negate=False)


def _language(nodes: State, *, negate: bool) -> Node | None:
    points = representatives(nodes)
    ends = [*(point - 1 for point in points[1:]), MAX_CHAR]
    states, arrows = {nodes: 0}, dict[tuple[int, int], Ranges]()
    waiting = [nodes]
    while waiting:
        state = waiting.pop()
        for low, high in zip(points, ends, strict=True):
            after = tuple(derivative(node, low) for node in state)
            if not negate and NOTHING in after:
                continue
            if after not in states:
                states[after] = len(states)
                waiting.append(after)
            edge = (states[state], states[after])
            arrows[edge] = union(arrows.get(edge, ()), ((low, high),))
        if len(states) > MAX_STATES:
            return None
    accepting = [i for state, i in states.items() if all(map(nullable, state)) != negate]
    return _eliminate(len(states), arrows, accepting)


def _eliminate(
    size: int, arrows: dict[tuple[int, int], Ranges], accepting: list[int]
) -> Node | None:
    """Kleene's construction: states are taken away, and arrows carry what passed through them."""
    start, end = size, size + 1
    labels: dict[tuple[int, int], Node] = {edge: Chars(r) for edge, r in arrows.items()}
    labels[(start, 0)] = EMPTY
    labels |= {(state, end): EMPTY for state in accepting}
    remaining = set(range(size))
    while remaining:
        gone = min(remaining, key=lambda s: _degree(labels, s))
        remaining.discard(gone)
        loop = repeat(labels.pop((gone, gone), NOTHING), 0, None)
        entering = [(a, label) for (a, b), label in labels.items() if b == gone]
        leaving = [(b, label) for (a, b), label in labels.items() if a == gone]
        labels = {edge: label for edge, label in labels.items() if gone not in edge}
        for a, before in entering:
            for b, after in leaving:
                path = seq([before, loop, after])
                labels[(a, b)] = alt([labels.get((a, b), NOTHING), path])
        if sum(1 for label in labels.values() for _ in walk(label)) > MAX_NODES:
            return None
    return labels.get((start, end), NOTHING)


def _degree(labels: dict[tuple[int, int], Node], state: int) -> int:
    return sum(a == state for a, _ in labels) * sum(b == state for _, b in labels)
