"""Which written schemas xgrammar enforces exactly: an allow-list of node shapes, and a cost.

The list was proven for the versions named here by the suite and the property tests of
tests/structured; with any other version all schemas go to llguidance, which refuses what it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plait.structured.schema import regex
from plait.structured.schema.values import exact, is_integer
from plait.structured.schema.writing import inner

PROVEN_XGRAMMAR = frozenset({"0.2.9"})

# Beyond these xgrammar, which makes all masks beforehand, compiles for 50 ms and more (5 to 10 ms
# for each property); llguidance takes a few ms for hundreds.
MAX_NODES = 16
MAX_ENUM = 64
MAX_OPTIONAL = 8
MAX_ITEMS = 64
MAX_ALTERNATIVES = 64
MAX_PATTERN_CHARS = 128
_MAX_INTEGER = 2**53
_INT64 = 2**63
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_PRINTABLE = regex.common(regex.complement(((34, 34), (92, 92))), ((32, 126),))


@dataclass(frozen=True, slots=True)
class Doubt:
    """A keyword in the written schema that is not proven for xgrammar, and why."""

    keyword: str
    why: str


def is_proven(schema: Any) -> bool:
    """Whether xgrammar enforces a written schema, and compiles it quickly."""
    return not _is_large(schema) and not doubts(schema)


def _is_large(schema: Any) -> bool:
    waiting = [schema]
    for number, node in enumerate(waiting):
        if number == MAX_NODES:
            return True
        waiting += inner(node)
    return False


def doubts(schema: Any) -> list[Doubt]:
    """All that keeps a written schema from xgrammar; nothing where it is proven and cheap."""
    found: dict[Doubt, None] = {}
    num_nodes = num_alternatives = 0
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        found |= dict.fromkeys(_of_node(node))
        num_nodes += 1
        if isinstance(node, dict):
            num_alternatives += len(node.get("anyOf", ()))
        waiting += inner(node)
    if num_nodes > MAX_NODES:
        found[Doubt("properties", f"{num_nodes:,} nodes would compile slowly")] = None
    if num_alternatives > MAX_ALTERNATIVES:
        found[Doubt("anyOf", f"{num_alternatives:,} alternatives would compile slowly")] = None
    return list(found)


def _of_node(node: Any) -> list[Doubt]:
    if not isinstance(node, dict) or not node.keys() - {"$defs"}:
        return []
    keys = node.keys() - {"$defs"}
    if keys in ({"anyOf"}, {"$ref"}):
        return []
    if keys == {"enum"}:
        return _enum(node["enum"])
    kind = node.get("type")
    if keys == {"type"}:
        return []
    if isinstance(kind, str) and kind in _OF_KIND:
        return _OF_KIND[kind](node)
    return [Doubt(key, f"not exact for {kind}") for key in sorted(keys - {"type"})]


def _beyond(node: dict[str, Any], allowed: set[str]) -> list[Doubt]:
    return [Doubt(k, "not exact") for k in sorted(node.keys() - allowed - {"type", "$defs"})]


def _enum(values: list[Any]) -> list[Doubt]:
    if len(values) > MAX_ENUM:
        return [Doubt("enum", f"{len(values):,} values would compile slowly")]
    if any(_is_unsafe(value) for value in values):
        return [Doubt("enum", "numbers are spelled in another way")]
    return []


def _is_unsafe(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_unsafe, value))
    if isinstance(value, dict):
        return any(map(_is_unsafe, value.values()))
    if isinstance(value, float):
        return True
    return isinstance(value, int) and abs(value) >= _INT64


def respelled(schema: Any) -> int | float | None:
    """A listed number of a written schema that llguidance, through doubles, makes another of."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        for value in node.get("enum", ()) if isinstance(node, dict) else ():
            if isinstance(value, str):
                continue
            for number in _whole_numbers(value):
                if not _survives(number):
                    return number
        waiting += inner(node)
    return None


def unwritten(schema: Any) -> str | None:
    """A listed text of a written schema with a control character that llguidance never writes."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        for value in node.get("enum", ()) if isinstance(node, dict) else ():
            for text in _texts(value):
                if _UNWRITTEN.search(text):
                    return text
        waiting += inner(node)
    return None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _whole_numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(each)
    elif not isinstance(value, str) and is_integer(value) and not isinstance(value, bool):
        yield value


def _survives(number: float) -> bool:
    if abs(number) <= _MAX_INTEGER:
        return True
    try:
        double = float(number)
    except OverflowError:
        return False
    is_counted = isinstance(number, int) and abs(number) < _INT64
    return (int(double) if is_counted else int(exact(double))) == number


def _object(node: dict[str, Any]) -> list[Doubt]:
    found = _beyond(node, {"properties", "required", "additionalProperties"})
    properties = node.get("properties", {})
    if properties and node.get("additionalProperties", {}) is not False:
        # A free key may spell a declared one by an escape, "\u0061" for "a", with any value.
        found.append(Doubt("additionalProperties", "free keys may repeat declared ones"))
    if any(schema is False for schema in properties.values()):
        found.append(Doubt("properties", "absent keys are not enforced"))
    if len(properties) - len(node.get("required", ())) > MAX_OPTIONAL:
        found.append(Doubt("properties", "many optional keys would compile slowly"))
    return found


def _array(node: dict[str, Any]) -> list[Doubt]:
    found = _beyond(node, {"items", "prefixItems", "minItems", "maxItems"})
    for key in ("minItems", "maxItems"):
        if node.get(key, 0) > MAX_ITEMS:
            found.append(Doubt(key, "long repetitions compile slowly"))
    if len(node.get("prefixItems", ())) > MAX_ITEMS:
        found.append(Doubt("prefixItems", "long lists compile slowly"))
    return found


def _integer(node: dict[str, Any]) -> list[Doubt]:
    bounds = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    found = _beyond(node, bounds)
    found += [
        Doubt(key, "beyond 53 bits") for key in bounds if abs(node.get(key, 0)) > _MAX_INTEGER
    ]
    return found


def _string(node: dict[str, Any]) -> list[Doubt]:
    found = _beyond(node, {"pattern"})
    if "pattern" not in node:
        return found
    language = regex.fullmatch(node["pattern"])
    if not is_simple(language):
        found.append(Doubt("pattern", "it allows what JSON escapes, or repeats long"))
    elif not is_one_way(language):
        found.append(Doubt("pattern", "it repeats inside of a choice or of a repetition"))
    return found


_OF_KIND = {"object": _object, "array": _array, "string": _string, "integer": _integer}


def is_simple(node: regex.Node) -> bool:
    """Whether xgrammar reads a language exactly, as a regex of its own: short, plain, printable."""
    for each in regex.walk(node):
        if isinstance(each, regex.Chars):
            if regex.common(each.ranges, _PRINTABLE) != each.ranges:
                return False
        elif isinstance(each, regex.Repeat) and max(each.low, each.high or 0) > MAX_PATTERN_CHARS:
            return False
    return spread(node) <= MAX_PATTERN_CHARS * 4


def is_one_way(node: regex.Node) -> bool:
    """Whether no repetition of varying count stands inside of alternatives or of another.

    Inside of JSON strings xgrammar 0.2.9 merges states there that differ: by the pattern
    `^(a{1,2}|a)$` it lets "aaa" through, and by `^(a+b)?$` it does "a".
    """
    for each in regex.walk(node):
        if isinstance(each, regex.Alt) and not _is_fixed(each):
            return False
        if isinstance(each, regex.Repeat) and not _is_fixed(each.node):
            return False
    return True


def _is_fixed(node: regex.Node) -> bool:
    repeats = (each for each in regex.walk(node) if isinstance(each, regex.Repeat))
    return all(each.low == each.high for each in repeats)


def spread(node: regex.Node) -> int:
    """How many nodes a language has once its repetitions are written out."""
    if isinstance(node, regex.Seq):
        return sum(map(spread, node.parts)) + 1
    if isinstance(node, regex.Alt):
        return sum(map(spread, node.options)) + 1
    if isinstance(node, regex.Repeat):
        return spread(node.node) * max(1, node.low, node.high or 0)
    return 1
