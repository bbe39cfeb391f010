"""`uniqueItems` beside the grammar: a table of the written schema that a reader can follow.

The writer leaves the keyword in the written schema, with its pointer; here it is taken out again.
A state of the table stands for all parts of the schema that may describe a value. It tells where
inner values lead, which lists must not repeat an item, and what was proven of their items.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from plait.structured.schema import items, regex
from plait.structured.schema.derive import matches
from plait.structured.schema.items import Node, NotProven, Scalars
from plait.structured.schema.refusal import Refusal

MAX_STATES = 2_000
MAX_BYTES = 512 * 1024
PLAIN = -1  # the state of values in which nothing must be unique
_REF = "#/$defs/"
_FREE: Node = {}

State = frozenset[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """The written schema without `uniqueItems`, and what keeps it instead."""

    schema: Any
    checks: bytes = b""  # empty where nothing must be unique
    refusals: tuple[Refusal, ...] = ()


def plan(schema: Any, text: str, *, whole: bool) -> Plan:
    """Take `uniqueItems` out of a written schema, whose JSON is `text`, and tell how it is kept."""
    if '"uniqueItems"' not in text:
        return Plan(schema)
    table = _Table(schema)
    try:
        table.build(whole=whole)
    except NotProven as error:
        at = table.refusing
        return Plan(schema, b"", (Refusal(at, "uniqueItems", error.why, error.instead),))
    _strip(schema)
    if table.root == PLAIN:
        return Plan(schema)
    found = {"root": table.root, "states": table.rows(), "languages": table.languages}
    checks = json.dumps(found, separators=(",", ":")).encode()
    if len(checks) > MAX_BYTES:
        why = "its strings take too much room to be counted"
        return Plan(schema, b"", (Refusal(table.refusing, "uniqueItems", why, "list fewer"),))
    return Plan(schema, checks)


@dataclass(slots=True)
class _Row:
    """A state in the making."""

    names: dict[str, State] = field(default_factory=dict)
    patterns: list[tuple[str, State]] = field(default_factory=list)
    rest: State = frozenset()
    prefix: list[State] = field(default_factory=list)
    items: State = frozenset()
    facts: dict[str, Any] = field(default_factory=dict)

    def following(self) -> list[State]:
        """The states of all inner values."""
        inner = [*self.names.values(), *(state for _, state in self.patterns)]
        return [*inner, self.rest, *self.prefix, self.items]


class _Table:
    """The states that can be reached, from the root on."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._defs = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._nodes: list[Node] = []
        self._numbers: dict[str, int] = {}
        self._known: dict[int, int] = {}
        self._flat: dict[int, State] = {}
        self._rows: dict[State, _Row] = {}
        self._endless: dict[State, bool] = {}
        self._keep: list[Any] = []
        self.languages: list[dict[str, Any]] = []
        self.refusing = ""
        self.root = PLAIN

    def build(self, *, whole: bool) -> None:
        """Find all states and prove what must be. Raises `NotProven`."""
        self._start = self._state([self._schema])
        waiting = [self._start]
        while waiting:
            state = waiting.pop()
            if state in self._rows:
                continue
            self._rows[state] = row = self._row(state)
            waiting += row.following()
            if len(self._rows) > MAX_STATES:
                self.refusing = self._first_pointer()
                raise NotProven("the schema has too many parts to be followed", "make it smaller")
        for state, row in self._rows.items():
            self._prove(state, row)
        self._number_rows()
        if self.root != PLAIN and not whole:
            self.refusing = self._first_pointer()
            raise NotProven(
                "items are compared only where the schema describes the whole answer",
                "bound the list to one item, list up to five values by 'enum', or leave it out",
            )

    def _first_pointer(self) -> str:
        return next((str(n["uniqueItems"]) for n in self._nodes if "uniqueItems" in n), "")

    # --- states ---

    def _state(self, schemas: list[Any]) -> State:
        return frozenset().union(*map(self._flattened, schemas))

    def _flattened(self, schema: Any) -> State:
        """The parts of a schema behind references and alternatives."""
        if schema is False:
            return frozenset()
        if schema is True:
            schema = {}
        if not schema.keys() - {"$defs"}:
            return frozenset({self._number(_FREE)})
        if id(schema) in self._flat:
            return self._flat[id(schema)]
        self._keep.append(schema)
        self._flat[id(schema)] = frozenset()  # a circle of references adds nothing
        if "$ref" in schema:
            found = self._flattened(self._defs[schema["$ref"].removeprefix(_REF)])
        elif "anyOf" in schema:
            found = self._state(schema["anyOf"])
        else:
            found = frozenset({self._number(schema)})
        self._flat[id(schema)] = found
        return found

    def _number(self, node: Node) -> int:
        if id(node) not in self._known:
            self._keep.append(node)
            key = json.dumps(node)  # shared definitions may have been copied
            if key not in self._numbers:
                self._numbers[key] = len(self._nodes)
                self._nodes.append(node)
            self._known[id(node)] = self._numbers[key]
        return self._known[id(node)]

    def _members(self, state: State) -> list[Node]:
        return [self._nodes[number] for number in sorted(state)]

    def _row(self, state: State) -> _Row:
        nodes = self._members(state)
        objects, lists = items.of_type(nodes, "object"), items.of_type(nodes, "array")
        row = _Row()
        for name in dict.fromkeys(n for node in objects for n in node.get("properties", ())):
            row.names[name] = self._state([_under(node, name) for node in objects])
        patterns = [(p, inner) for n in objects for p, inner in _patterns(n)]
        rest = [node.get("additionalProperties", True) for node in objects]
        if len(objects) == 1:
            row.patterns = [(pattern, self._state([inner])) for pattern, inner in patterns]
            row.rest = self._state(rest)
        else:
            row.rest = self._state([*rest, *(inner for _, inner in patterns)])
        length = max((len(node.get("prefixItems", ())) for node in lists), default=0)
        for i in range(length):
            row.prefix.append(self._state([_item(node, i) for node in lists]))
        row.items = self._state([_item(node, length) for node in lists])
        return row

    # --- proofs ---

    def _prove(self, state: State, row: _Row) -> None:
        nodes = self._members(state)
        lists = items.of_type(nodes, "array")
        row.facts["open"] = self._is_open(items.of_type(nodes, "object"))
        row.facts["last"] = self._last(items.of_type(nodes, "object"))
        row.facts["endless"] = self._lists_endless(lists)
        unique = [node for node in lists if "uniqueItems" in node]
        if not unique:
            return
        self.refusing = str(unique[0]["uniqueItems"])
        if any(isinstance(value, list) and value for value in items.listed(nodes)):
            raise NotProven(
                "other lists are listed as values beside it", "describe them by 'items'"
            )
        row.facts["unique"] = True
        if row.prefix:
            for each in (*row.prefix, row.items):
                self._prove_endless(each)
            return
        states = dict.fromkeys(self._state([node.get("items", True)]) for node in lists)
        found = [self._prove_items(state) for state in states]
        if len(found) > 1:
            self._prove_together(found)
            self._prove_items(row.items)
        strings = next((each.strings for each in found if each.strings), None)
        others = next((each.others for each in found if each.others), None)
        row.facts["scalars"] = self._number_languages(
            dataclasses.replace(found[0], strings=strings, others=others)
        )
        if len(found) == 1 and not math.isinf(found[0].size):
            if max(node.get("minItems", 0) for node in lists) > found[0].size:
                raise NotProven(f"its items have only {found[0].size} values", "lower 'minItems'")
            row.facts["size"] = found[0].size

    def _prove_endless(self, state: State) -> None:
        if state and not self._is_endless(state):
            raise NotProven(
                "first items of their own can only be held apart if they are strings or open "
                "objects",
                "allow one kind of items",
            )

    def _prove_together(self, found: list[Scalars]) -> None:
        """Lists of several kinds, of which the items decide later which it is."""
        others = {json.dumps(each.others.as_json()) for each in found if each.others}
        if any(each.strings for each in found) or len(others) > 1:
            raise NotProven(
                "there are lists of several kinds, whose items cannot be counted together",
                "allow one kind of list here",
            )
        if not all(math.isinf(each.size) for each in found):
            raise NotProven(
                "of the lists that are allowed here, some have items of few values",
                "allow one kind of list here",
            )

    def _prove_items(self, state: State) -> Scalars:
        """The scalars among items, all of which can be held apart; `size` is that of all."""
        nodes = self._members(state)
        objects, lists = items.of_type(nodes, "object"), items.of_type(nodes, "array")
        found = items.scalars(nodes)
        if objects and not self._is_open(objects) and self._last(objects) is None:
            raise NotProven(
                "closed objects can only be held apart by a property without end, such as a "
                "string without maxLength",
                "add one, allow further keys, or bound the list to one item",
            )
        if lists and not self._lists_endless(lists):
            raise NotProven("inner lists of bounded length cannot be held apart", "leave it out")
        endless = found.free or objects or lists
        return dataclasses.replace(found, size=math.inf) if endless else found

    def _is_open(self, objects: list[Node]) -> bool:
        return bool(objects) and all(map(items.has_free_keys, objects))

    def _lists_endless(self, lists: list[Node]) -> bool:
        return bool(lists) and all(map(self._list_endless, lists))

    def _list_endless(self, node: Node) -> bool:
        if items.has_free_items(node):
            return True
        return (
            "uniqueItems" in node
            and "maxItems" not in node
            and self._is_endless(self._state([node.get("items", True)]))
        )

    def _last(self, objects: list[Node]) -> int | None:
        """The place of the last key of a closed object whose value can differ without end."""
        if len(objects) != 1 or not items.has_plain_keys(objects[0]):
            return None
        if "maxProperties" in objects[0] or objects[0].get("patternProperties"):
            return None
        inner = list(objects[0].get("properties", {}).values())
        found = [i for i, each in enumerate(inner) if self._is_endless(self._state([each]))]
        return found[-1] if found else None

    def _is_endless(self, state: State) -> bool:
        """Whether each value, while it is being written, can become others without end."""
        if state not in self._endless:
            self._endless[state] = False  # a circle proves nothing
            self._endless[state] = self._find_endless(state)
        return self._endless[state]

    def _find_endless(self, state: State) -> bool:
        nodes = self._members(state)
        objects, lists = items.of_type(nodes, "object"), items.of_type(nodes, "array")
        try:
            found = items.scalars(nodes)
        except NotProven:
            return False
        return (
            (found.free or math.isinf(found.size) or bool(objects or lists))
            and (not objects or self._is_open(objects) or self._last(objects) is not None)
            and (not lists or self._lists_endless(lists))
        )

    # --- the table ---

    def _number_rows(self) -> None:
        kept = self._needed()
        self._index = {state: i for i, state in enumerate(s for s in self._rows if s in kept)}
        self.root = self._index.get(self._start, PLAIN)

    def _needed(self) -> set[State]:
        """States on the way to lists without repetition, and those inside closed items."""
        before: dict[State, list[State]] = {}
        for state, row in self._rows.items():
            for inner in row.following():
                before.setdefault(inner, []).append(state)
        unique = [state for state, row in self._rows.items() if "unique" in row.facts]
        needed = _closure(unique, before)
        closed = [
            each
            for state in unique
            for each in (*self._rows[state].prefix, self._rows[state].items)
        ]
        return needed | _closure(closed, {s: row.following() for s, row in self._rows.items()})

    def rows(self) -> list[dict[str, Any]]:
        """The states as plain data."""
        return [self._plain(self._rows[state], state) for state in self._index]

    def _number_languages(self, found: Scalars) -> list[int | None]:
        """Their numbers in `languages`, in which each is once."""
        numbers: list[int | None] = []
        for each in (found.strings, found.others):
            if each is None:
                numbers.append(None)
                continue
            plain = each.as_json()
            if plain not in self.languages:
                self.languages.append(plain)
            numbers.append(self.languages.index(plain))
        return numbers

    def _plain(self, row: _Row, state: State) -> dict[str, Any]:
        index = self._index

        def number(inner: State) -> int:
            return index.get(inner, PLAIN)

        found = {k: v for k, v in row.facts.items() if v is not None and v is not False}
        objects = items.of_type(self._members(state), "object")
        closed = row.facts.get("last") is not None and not row.facts["open"]
        names = {name: number(inner) for name, inner in row.names.items()}
        if closed:
            found["order"] = list(objects[0].get("properties", {}))
            last = self._members(list(row.names.values())[found["last"]])
            found["scalars"] = self._number_languages(items.scalars(last))
        else:
            found.pop("last", None)
        patterns = [(pattern, number(inner)) for pattern, inner in row.patterns]
        if any(to != number(row.rest) for _, to in patterns):
            found["patterns"] = patterns
        rest = number(row.rest)
        found["names"] = {n: to for n, to in names.items() if to != rest or "patterns" in found}
        found["rest"], found["items"] = rest, number(row.items)
        if row.prefix:
            found["prefix"] = [number(inner) for inner in row.prefix]
        return found


def _closure(start: list[State], arrows: dict[State, list[State]]) -> set[State]:
    found, waiting = set(start), list(start)
    while waiting:
        for state in arrows.get(waiting.pop(), ()):
            if state not in found:
                found.add(state)
                waiting.append(state)
    return found


def _patterns(node: Node) -> list[tuple[str, Any]]:
    return list(node.get("patternProperties", {}).items())


def _under(node: Node, name: str) -> Any:
    """The schema of the value under a key."""
    if name in node.get("properties", ()):
        return node["properties"][name]
    for pattern, inner in _patterns(node):
        if matches(regex.search(pattern), name):
            return inner
    return node.get("additionalProperties", True)


def _item(node: Node, index: int) -> Any:
    prefix = node.get("prefixItems", ())
    return prefix[index] if index < len(prefix) else node.get("items", True)


def _strip(schema: Any) -> None:
    from plait.structured.schema.writing import inner

    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            node.pop("uniqueItems", None)
        waiting += inner(node)
