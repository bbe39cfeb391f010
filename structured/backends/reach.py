"""Whether all parts of an xgrammar grammar lead to an end, and within how many bytes.

The library does not ask. From a part without an end nothing follows, or the same text for ever;
and it spells forced text out to its end, however far that is, each time it is asked.
"""

from __future__ import annotations

import json
from typing import Any

from plait.platform.errors import GrammarTooComplex

# Forced text of this length takes the library 5 ms.
MAX_SHORTEST_BYTES = 64 * 1024
_NEVER = 1 << 60  # bytes: no end; also what sums are cut at
_STRING, _CLASS, _STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _DISPATCH, _REPEAT = range(9)


class Reach:
    """The shortest texts of a grammar, as the library serialises one."""

    def __init__(self, serialized: str) -> None:
        grammar = json.loads(serialized)
        self._rules: list[list[Any]] = grammar["rules"]
        self._data: list[int] = grammar["grammar_expr_data"]
        self._starts: list[int] = grammar["grammar_expr_indptr"]
        self._shortest = [_NEVER] * len(self._rules)
        self._order = self._reachable(grammar["root_rule_id"])
        self._settle()

    def fault(self) -> str:
        """For which part no end is found; empty where all is well.

        Raises `GrammarTooComplex` for an end that is too far.
        """
        for rule in self._order:
            name = str(self._rules[rule][0])[:64]
            for part in self._parts(self._rules[rule][1]):
                length = self._length(part)
                if length >= _NEVER:
                    return f"no text fulfils a part of rule {name!r}"
                if length > MAX_SHORTEST_BYTES:
                    raise GrammarTooComplex(
                        f"the shortest text of a part of rule {name!r} has {length:,} bytes; "
                        f"{MAX_SHORTEST_BYTES:,} are the limit"
                    )
        return ""

    def _expression(self, number: int) -> tuple[int, list[int]]:
        at = self._starts[number]
        size = self._data[at + 1]
        return self._data[at], self._data[at + 2 : at + 2 + size]

    def _parts(self, number: int) -> list[int]:
        """A rule's alternatives, those inside of others too."""
        kind, data = self._expression(number)
        if kind not in (_SEQUENCE, _CHOICES):
            return [number]
        inner = [part for each in data for part in self._parts(each)]
        return [number, *inner] if kind == _SEQUENCE else inner

    def _used(self, number: int) -> list[int]:
        kind, data = self._expression(number)
        if kind in (_SEQUENCE, _CHOICES):
            return [rule for each in data for rule in self._used(each)]
        if kind == _DISPATCH:
            return data[1:-2:2]  # pairs of a trigger and a rule, and two options
        return data[:1] if kind in (_RULE, _REPEAT) else []

    def _reachable(self, root: int) -> list[int]:
        """Rules from the root on, those that others use first."""
        order, seen = [], {root}
        path = [(root, iter(self._used(self._rules[root][1])))]
        while path:
            rule, used = path[-1]
            found = next((each for each in used if each not in seen), None)
            if found is None:
                order.append(rule)
                path.pop()
            else:
                seen.add(found)
                path.append((found, iter(self._used(self._rules[found][1]))))
        return order

    def _settle(self) -> None:
        changed = True
        while changed:
            changed = False
            for rule in self._order:
                length = self._length(self._rules[rule][1])
                if length < self._shortest[rule]:
                    self._shortest[rule], changed = length, True

    def _length(self, number: int) -> int:
        kind, data = self._expression(number)
        if kind == _SEQUENCE:
            return min(_NEVER, sum(self._length(each) for each in data))
        if kind == _CHOICES:
            return min((self._length(each) for each in data), default=_NEVER)
        if kind == _STRING:
            return len(data)
        if kind == _CLASS:
            return _NEVER if _is_empty(data) else 1
        if kind == _RULE:
            return self._shortest[data[0]]
        if kind == _REPEAT:
            return min(_NEVER, self._shortest[data[0]] * data[1])
        return 0 if kind in (_STAR, _EMPTY, _DISPATCH) else 1  # 1: a token by its number


def _is_empty(data: list[int]) -> bool:
    """Of a class: whether it is negated, then its ranges."""
    if not data[0]:
        return len(data) == 1
    end = 0
    for low, high in sorted(zip(data[1::2], data[2::2], strict=True)):
        if low > end:
            return False
        end = max(end, high + 1)
    return end > 0x10FFFF
