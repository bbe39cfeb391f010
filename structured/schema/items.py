"""What the items of a list may be, and whether one more that differs can always be found.

Uniqueness is kept by forbidding the token that would end a repetition. That must never leave a
place from which nothing can follow. Three kinds of items are proven: scalars, whose languages are
counted; lists and objects without an end, which can always get one more member; and closed objects
with a free string, which is the place to differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from plait.structured.schema import counting, regex
from plait.structured.schema.counting import Automaton, Language, Lengths
from plait.structured.schema.values import TYPES

Node = dict[str, Any]
_MAX_LITERALS = 1_000
_PLAIN_KEY = regex.complement(((0, 31), (34, 34), (92, 92), (127, 127)))


class NotProven(Exception):
    """Why items cannot be held apart, and what to write instead."""

    def __init__(self, why: str, instead: str) -> None:
        super().__init__(why)
        self.why, self.instead = why, instead


def types_of(node: Node) -> list[str]:
    """The JSON types that a node without references speaks of, if it lists no values."""
    named = node.get("type", [*TYPES])
    names = [named] if isinstance(named, str) else named
    return ["number" if name == "integer" else name for name in names]


def of_type(nodes: Iterable[Node], kind: str) -> list[Node]:
    """The nodes that describe values of a type."""
    return [node for node in nodes if "enum" not in node and kind in types_of(node)]


def listed(nodes: Iterable[Node]) -> list[Any]:
    """All values that are listed one by one."""
    return [value for node in nodes for value in node.get("enum", ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalars:
    """Languages of scalar items: of strings, without their quotes, and of all others as text.

    No language of strings: all that the grammar allows can be extended without end.
    """

    strings: Language | None = None
    others: Language | None = None
    size: float = 0  # how many values there are
    free: bool  # strings are allowed, and can be extended without end


def scalars(nodes: list[Node]) -> Scalars:
    """The languages of the scalars among items. Raises `NotProven`."""
    values = listed(nodes)
    if any(isinstance(value, dict | list) for value in values):
        raise NotProven(
            "lists and objects that are listed as values cannot be counted",
            "describe the items by 'properties' or 'items'",
        )
    texts = [value for value in values if isinstance(value, str)]
    strings, free = _strings(of_type(nodes, "string"), texts)
    others = _others(nodes, [value for value in values if not isinstance(value, str)])
    size = sum(each.num_left(0) for each in (strings, others) if each)
    return Scalars(strings=strings, others=others, size=size, free=free)


def is_free(node: Node) -> bool:
    """Whether each beginning of a string can go on without end."""
    language = _of_string(node)
    return language is None or (
        isinstance(language, Automaton) and all(left == math.inf for left in language.left)
    )


def _strings(nodes: list[Node], texts: list[str]) -> tuple[Language | None, bool]:
    if nodes and all(map(is_free, nodes)) and not texts:
        return None, True
    if any(_of_string(node) is None for node in nodes):
        return None, True  # free strings, which hold all the others
    if len(nodes) == 1 and not texts:
        return _of_string(nodes[0]), False
    return (_together(nodes, texts), False) if nodes or texts else (None, False)


def _together(nodes: list[Node], texts: list[str]) -> Language:
    """Several languages of strings as one."""
    if not nodes:
        return counting.of_words([text for text in texts if _is_spellable(text)])
    options = [*map(counting.literal, texts[:_MAX_LITERALS])]
    for node in nodes:
        patterns = _patterns(node)
        if len(patterns) != 1 or "maxLength" in node or node.get("minLength", 0):
            raise NotProven(
                "strings of several kinds are more than can be counted",
                "allow one kind of strings, or leave lengths out",
            )
        options += patterns
    return _built((regex.alt(options),))


def _is_spellable(text: str) -> bool:
    return all(regex.common(((ord(c), ord(c)),), counting.SPELLABLE) for c in text)


def _of_string(node: Node) -> Language | None:
    """The language of one node; None for one that is free whatever was written."""
    patterns = _patterns(node)
    low, high = node.get("minLength", 0), node.get("maxLength")
    if not patterns:
        return None if high is None else Lengths(low, high)
    if low or high is not None:
        patterns.append(regex.repeat(regex.ANY_CHAR, low, high))
    return _built(tuple(patterns))


def _patterns(node: Node) -> list[regex.Node]:
    members = [node, *node.get("allOf", ())]
    return [regex.search(each["pattern"]) for each in members if "pattern" in each]


def _built(nodes: tuple[regex.Node, ...]) -> Automaton:
    found = counting.build(nodes)
    if found is None:
        raise NotProven(
            "the strings that are allowed take too long to count",
            "use a shorter pattern or a lower maxLength",
        )
    return found


def _others(nodes: list[Node], values: list[Any]) -> Automaton | None:
    """Numbers, true, false and null, as they are spelled."""
    options = [counting.literal(text) for text in map(_spelled, values)]
    for kind, texts in (("boolean", ("false", "true")), ("null", ("null",))):
        if of_type(nodes, kind):
            options += map(counting.literal, texts)
    options += [_number(node) for node in of_type(nodes, "number")]
    return _built((regex.alt(options),)) if options else None


def _spelled(value: Any) -> str:
    if isinstance(value, float) or (isinstance(value, int) and abs(value) > 2**53):
        raise NotProven(
            "listed numbers with a fraction have several spellings", "list integers or strings"
        )
    return json.dumps(value)


def _number(node: Node) -> regex.Node:
    if "multipleOf" in node:
        raise NotProven("multiples are not counted", "leave 'multipleOf' out")
    named = node.get("type", "number")
    low, high = node.get("minimum"), node.get("maximum")
    if "integer" in named and "number" not in named:
        return counting.integers(low, high)
    bounds = node.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    if bounds - {"minimum"} or low not in (None, 0):
        raise NotProven(
            "numbers between bounds are not counted", "use integers, or no bound but 'minimum': 0"
        )
    return counting.numbers(negative=low is None)


def has_free_keys(node: Node) -> bool:
    """Whether an object can always get one more key."""
    if "maxProperties" in node:
        return False
    patterns = node.get("patternProperties", {})
    if not patterns:
        return node.get("additionalProperties", True) is not False
    for pattern, inner in patterns.items():
        keys = counting.build((regex.search(pattern),))
        if inner is not False and keys and all(left == math.inf for left in keys.left):
            return True
    return False


def has_free_items(node: Node) -> bool:
    """Whether a list can always get one more item, be it like another."""
    return (
        "maxItems" not in node
        and "uniqueItems" not in node
        and node.get("items", True) is not False
    )


def has_plain_keys(node: Node) -> bool:
    """Whether all keys that are named are spelled as they are."""
    return all(
        regex.common(((ord(c), ord(c)),), _PLAIN_KEY)
        for name in node.get("properties", {})
        for c in name
    )
