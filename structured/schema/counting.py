"""Automata that count: how many texts are left from each place of a language on.

Where items must differ, a text may only be begun if some way to end it is not yet taken. How many
ways there are is a property of the language; how many are taken, of the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from plait.structured.schema.derive import derivative, next_points, nullable, representatives
from plait.structured.schema.regex import (
    DIGIT,
    EMPTY,
    MAX_CHAR,
    NOTHING,
    Chars,
    Node,
    Ranges,
    alt,
    common,
    complement,
    repeat,
    seq,
    walk,
)

MAX_STATES = 600
MAX_STEPS = 1_000_000  # states times characters to tell apart times parts: some 0.2 s

# What JSON strings hold in llguidance's one spelling: no control characters but those with a short
# escape, and no halves of surrogate pairs.
SPELLABLE = complement(((0, 7), (11, 11), (14, 31), (127, 127), (0xD800, 0xDFFF)))
_NUM_SPELLABLE = sum(high - low + 1 for low, high in SPELLABLE)

Arrows = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton without dead ends. State 0 is the beginning, -1 is outside."""

    accepting: tuple[bool, ...]
    arrows: tuple[Arrows, ...]  # of each state: first and last code point, and the state after
    left: tuple[float, ...]  # texts that lead from each state to an end; may be infinite
    words: tuple[str, ...] = ()  # what it was made of, if by `of_words`

    def step(self, state: int, point: int) -> int:
        """The state after a character."""
        for low, high, after in self.arrows[state]:
            if low <= point <= high:
                return after
        return -1

    def accepts(self, state: int) -> bool:
        """Whether the text may end."""
        return self.accepting[state]

    def num_left(self, state: int, first: Ranges | None = None) -> float:
        """How many texts may follow; with `first`, of those that begin with such a character."""
        if first is None:
            return self.left[state]
        arrows = [(after, _num_common(first, a, b)) for a, b, after in self.arrows[state]]
        return sum(self.left[after] * ways for after, ways in arrows if ways)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        if self.words:
            return {"words": self.words}
        return {"accepting": self.accepting, "arrows": self.arrows}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Strings of some length; a state is the length so far."""

    low: int
    high: int

    def step(self, state: int, point: int) -> int:
        """See `Automaton`."""
        return -1 if state == self.high or not _num_common(SPELLABLE, point, point) else state + 1

    def accepts(self, state: int) -> bool:
        """See `Automaton`."""
        return state >= self.low

    def num_left(self, state: int, first: Ranges | None = None) -> float:
        """See `Automaton`. Three characters more are as good as no end."""
        room = self.high - state
        if first is not None:
            if room == 0:
                return 0
            beginnings = sum(_num_common(SPELLABLE, low, high) for low, high in first)
            return beginnings * self.num_left(state + 1) if beginnings else 0
        if room >= 3:
            return math.inf
        least = max(0, self.low - state)
        counts: list[float] = [float(_NUM_SPELLABLE**more) for more in range(least, room + 1)]
        return sum(counts)

    def as_json(self) -> dict[str, Any]:
        """See `Automaton`."""
        return {"low": self.low, "high": self.high}


Language = Automaton | Lengths


def from_json(found: dict[str, Any]) -> Language:
    """The language that `as_json` wrote."""
    if "low" in found:
        return Lengths(found["low"], found["high"])
    if "words" in found:
        return of_words(found["words"])
    arrows = tuple(tuple((a, b, c) for a, b, c in each) for each in found["arrows"])
    accepting = tuple(found["accepting"])
    return Automaton(accepting, arrows, _counted(accepting, arrows))


def of_words(texts: Sequence[str]) -> Automaton:
    """The automaton of some texts: a tree of their common beginnings."""
    after: list[dict[str, int]] = [{}]
    ends = set()
    for text in texts:
        state = 0
        for char in text:
            if char not in after[state]:
                after[state][char] = len(after)
                after.append({})
            state = after[state][char]
        ends.add(state)
    arrows = tuple(tuple((ord(c), ord(c), to) for c, to in each.items()) for each in after)
    accepting = tuple(state in ends for state in range(len(after)))
    return Automaton(accepting, arrows, _counted(accepting, arrows), tuple(texts))


@lru_cache(maxsize=256)
def build(nodes: tuple[Node, ...], alphabet: Ranges = SPELLABLE) -> Automaton | None:
    """The automaton of the texts in all the languages; None where it is large, or empty."""
    num_points = len(representatives(nodes))
    size = sum(1 for node in nodes for _ in walk(node))
    states = {nodes: 0}
    arrows: list[list[tuple[int, int, int]]] = []
    waiting = [nodes]
    while waiting:
        state = waiting.pop(0)
        arrows.append([])
        points = next_points(state)  # fewer than those of all places together
        for low, high in zip(points, [*(point - 1 for point in points[1:]), MAX_CHAR], strict=True):
            after = tuple(derivative(node, low) for node in state)
            if NOTHING in after or not (kept := _within(alphabet, low, high)):
                continue
            if after not in states:
                states[after] = len(states)
                waiting.append(after)
            arrows[-1] += [(a, b, states[after]) for a, b in kept]
        if len(states) > MAX_STATES or len(states) * num_points * size > MAX_STEPS:
            return None
    accepting = [all(map(nullable, state)) for state in states]
    return _alive(accepting, arrows)


@lru_cache(maxsize=4096)
def _within(alphabet: Ranges, low: int, high: int) -> Ranges:
    return common(alphabet, ((low, high),))


def _alive(accepting: list[bool], arrows: list[list[tuple[int, int, int]]]) -> Automaton | None:
    """Without the states from which no end can be reached."""
    alive = {state for state, ends in enumerate(accepting) if ends}
    grown = True
    while grown:
        more = {s for s, each in enumerate(arrows) if any(to in alive for _, _, to in each)}
        grown = not more <= alive
        alive |= more
    if 0 not in alive:
        return None
    number = {state: i for i, state in enumerate(sorted(alive))}
    kept = tuple(
        tuple((low, high, number[to]) for low, high, to in arrows[state] if to in alive)
        for state in sorted(alive)
    )
    ends = tuple(accepting[state] for state in sorted(alive))
    return Automaton(ends, kept, _counted(ends, kept))


def _counted(accepting: tuple[bool, ...], arrows: tuple[Arrows, ...]) -> tuple[float, ...]:
    """Counts in an order in which all that follows is known; what is on a circle has no end."""
    left: dict[int, float] = {}
    waiting = {state: {to for _, _, to in each} for state, each in enumerate(arrows)}
    before: dict[int, list[int]] = {}
    for state, following in waiting.items():
        for to in following:
            before.setdefault(to, []).append(state)
    ready = [state for state, following in waiting.items() if not following]
    while ready:
        state = ready.pop()
        left[state] = accepting[state] + sum(
            (high - low + 1) * left[to] for low, high, to in arrows[state]
        )
        for each in before.get(state, ()):
            waiting[each].discard(state)
            if not waiting[each]:
                ready.append(each)
    return tuple(
        min(left.get(state, math.inf), 1 << 60) if state in left else math.inf
        for state in range(len(arrows))
    )


def _num_common(ranges: Ranges, low: int, high: int) -> int:
    return sum(max(0, min(b, high) - max(a, low) + 1) for a, b in ranges)


# --- languages ---


def literal(text: str) -> Node:
    """The language of one text."""
    return seq([Chars(((ord(c),) * 2,)) for c in text])


def integers(low: int | None, high: int | None) -> Node:
    """Whole numbers between bounds, each in its one spelling."""
    options = []
    if high is None or high >= 0:
        options.append(_numerals(max(0, low or 0), high))
    if low is None or low < 0:
        least = 1 if high is None else max(1, -high)
        options.append(seq([literal("-"), _numerals(least, None if low is None else -low)]))
    return alt(options)


def numbers(*, negative: bool) -> Node:
    """Numbers without exponents.

    Fractions have 15 digits at most, as far as binary floating point tells all apart.
    """
    digit = Chars(DIGIT)
    nonzero = Chars(((49, 57),))
    fractions = [seq([literal("0."), repeat(digit, 1, 14)])]
    for size in range(1, 15):
        whole = seq([nonzero, repeat(digit, size - 1, size - 1)])
        fractions.append(seq([whole, literal("."), repeat(digit, 1, 15 - size)]))
    some = alt([seq([nonzero, repeat(digit, 0, None)]), *fractions])
    return alt([literal("0"), seq([alt([EMPTY, literal("-")]), some]) if negative else some])


def _numerals(low: int, high: int | None) -> Node:
    digits = len(str(low))
    if high is None:
        longer = seq([Chars(((49, 57),)), repeat(Chars(DIGIT), digits, None)])
        return alt([_numerals(low, 10**digits - 1), longer])
    return alt(
        [
            _between(
                str(max(low, 10 ** (size - 1) if size > 1 else 0)), str(min(high, 10**size - 1))
            )
            for size in range(digits, len(str(high)) + 1)
        ]
    )


def _between(low: str, high: str) -> Node:
    """The numerals between two of the same length."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if low[0] == high[0]:
        return seq([literal(low[0]), _between(low[1:], high[1:])])
    options = [
        seq([literal(low[0]), _between(low[1:], "9" * rest)]),
        seq([literal(high[0]), _between("0" * rest, high[1:])]),
    ]
    if int(high[0]) - int(low[0]) > 1:
        middle = Chars(((ord(low[0]) + 1, ord(high[0]) - 1),))
        options.append(seq([middle, repeat(Chars(DIGIT), rest, rest)]))
    return alt(options)
