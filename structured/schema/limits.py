"""Bounds on a schema, checked before anything else reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from plait.platform.errors import GrammarTooComplex, InvalidSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How large a schema may be, and how far reading may unfold it."""

    max_bytes: int = 64 * 1024
    max_depth: int = 64
    max_properties: int = 5_000
    max_enum: int = 1_000
    max_count: int = 500_000  # that a lower bound of characters, items or keys may ask for
    max_alternatives: int = 256  # of one type, in one place
    max_work: int = 70_000  # branches joined and merged, some 10 µs each: a second at most
    max_definitions: int = 4_000
    max_written_bytes: int = 512 * 1024


_CONTAINERS = (dict, list)


def check_bounds(schema: Any, limits: Limits, param: str) -> str:
    """The schema as JSON. Raises where it is none, or larger than the limits."""
    if not isinstance(schema, dict | bool):
        raise InvalidSchema("a schema is a JSON object, true or false", param=param)
    _check_depth(schema, limits, param)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except UnicodeError:
        raise InvalidSchema("it has half a surrogate pair", param=param) from None
    except (TypeError, ValueError) as error:
        raise InvalidSchema(f"the schema is no JSON: {error}", param=param) from None
    if size > limits.max_bytes:
        raise GrammarTooComplex(
            f"the schema has {size:,} bytes; {limits.max_bytes:,} are the limit. "
            "Leave out what the answer does not need",
            param=param,
        )
    _check_counts(schema, limits, param)
    return text


def _check_depth(schema: Any, limits: Limits, param: str) -> None:
    # By levels, not by recursion: a deep schema must not exhaust the stack first.
    level, depth = [schema] if isinstance(schema, _CONTAINERS) else [], 0
    while level:
        depth += 1
        if depth > limits.max_depth * 3:  # a level of a schema takes up to three of JSON
            raise GrammarTooComplex(
                f"the schema is nested deeper than {limits.max_depth} levels; name inner schemas "
                "in $defs and refer to them",
                param=param,
            )
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, _CONTAINERS)
        ]


_MAX_NUMBER = 10**300
_Path = tuple[Any, Any] | None  # the path of what holds a node, and its place there


def _pointer(path: _Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(f"/{escape(str(step))}")
    return "".join(reversed(steps))


def _check_counts(schema: Any, limits: Limits, param: str) -> None:
    waiting: list[tuple[Any, _Path]] = [(schema, None)]
    num_properties = 0
    while waiting:
        node, path = waiting.pop()
        if isinstance(node, bool):
            continue
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(child, str):
                continue
            if isinstance(child, _CONTAINERS):
                waiting.append((child, (path, key)))
            elif isinstance(child, int) and abs(child) > _MAX_NUMBER:
                raise GrammarTooComplex(
                    f"{_pointer((path, key))}: a number beyond {float(_MAX_NUMBER):g} cannot be "
                    "compared; leave it out, or write it as a string",
                    param=param,
                )
        if isinstance(node, list):
            continue
        properties, enum = node.get("properties"), node.get("enum")
        num_properties += len(properties) if isinstance(properties, dict) else 0
        if isinstance(enum, list) and len(enum) > limits.max_enum:
            raise GrammarTooComplex(
                f"'enum' at {_pointer(path)}/enum: {len(enum):,} values; "
                f"{limits.max_enum:,} are the limit. "
                "Say it by 'pattern', or list those that are meant",
                param=param,
            )
    if num_properties > limits.max_properties:
        raise GrammarTooComplex(
            f"{num_properties:,} properties are too many; {limits.max_properties:,} are the limit",
            param=param,
        )


def escape(key: str) -> str:
    """A key as one step of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def unescape(step: str) -> str:
    """One step of a JSON pointer as a key."""
    return step.replace("~1", "/").replace("~0", "~")
