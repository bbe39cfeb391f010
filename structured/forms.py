"""A written schema as rules of a Lark grammar that lets values take all their usual forms.

The libraries' own JSON grammars write keys in one order and whole numbers without a fraction. Here
the keys of small objects come in any order, by a rule for each set of keys that may still come, and
a whole number may end in `.0`. What has no other form is left to llguidance's own compiler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plait.structured.backends.llguidance import json_text
from plait.structured.schema import automata, derive, prove, regex, whole_numbers
from plait.structured.schema.normalise import Normalised
from plait.structured.schema.values import compact, is_integer
from plait.structured.schema.writing import REFERENCE, inner

MAX_UNORDERED = 4  # keys; each more doubles the rules
MAX_RULES = 3_000
MAX_BYTES = 256 * 1024

# To here a reader that takes 1.0 for a double has the same number.
_MOST = 10**15 - 1
_MAX_DOUBLE_INT = 2**53
# A string in the only spelling that each has; see `json_allowed_escapes`.
_STRING = r'/"(?:\\["\\bfnrt]|[^"\\\x00-\x1f\x7f])*"/'

Node = dict[str, Any]


class _Beyond(Exception):
    """The schema takes too many rules, or has parts that nothing fulfils, or cannot be written so.

    The library's own compiler, which sees dead parts and leaves them out, is asked then.
    """


def of(found: Normalised, options: Mapping[str, Any], *, start: str) -> list[str] | None:
    """The rules of a written schema, of which `start` is the first.

    None where nothing in it has another form, or the rules would be too many. `options` are
    those of llguidance's schema compiler.
    """
    writer = _Writer(found.schema, options, found.meaning.whole_fractions)
    if not writer.has_forms or prove.respelled(found.schema) is not None:
        return None
    try:
        rules = writer.write(start)
    except _Beyond:
        return None
    return rules if sum(map(len, rules)) <= MAX_BYTES else None


def quoted(text: str) -> str:
    """A text as a string of Lark, all in ASCII."""
    return json.dumps(text, ensure_ascii=True)


def slashed(pattern: str) -> str:
    """A pattern between slashes, on one line."""
    import llguidance

    made = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))
    text: str = made["grammars"][0]["lark_grammar"]
    return text.removeprefix("start:").strip()


class _Writer:
    def __init__(self, schema: Any, options: Mapping[str, Any], whole_fractions: bool) -> None:
        self._root = schema
        self._defs: Node = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        self._options = options
        self._whole_fractions = whole_fractions
        self._named: dict[str, str] = {}  # rules by what they say
        self._texts: dict[str, str] = {}  # and the other way round
        self._of_defs: dict[str, str] = {}
        self._waiting: list[str] = []
        self._terminals: dict[str, str] = {}
        self._plain: dict[int, tuple[Node, bool]] = {}  # by identity, with what keeps that
        self._space()

    @property
    def has_forms(self) -> bool:
        """Whether any value may be written in more than one way."""
        return any(self._varies(node) for node in _parts(self._root))

    def write(self, start: str) -> list[str]:
        """All rules. Raises `_Beyond`."""
        root = self._value(self._root)
        aliases = []
        while self._waiting:
            name = self._waiting.pop()
            aliases.append(f"{self._of_defs[name]}: {self._value(self._defs[name])}")
        texts = [f"{name}: {text}" for name, text in self._texts.items()]
        terminals = [f"{name}: {text}" for text, name in self._terminals.items()]
        return [f"{start}: {root}", *aliases, *texts, *terminals]

    def _space(self) -> None:
        """The marks between values, with what space is allowed around them."""
        pattern = self._options.get("whitespace_pattern")
        some = self._options.get("whitespace_flexible") is True and isinstance(pattern, str)
        space = ""
        if some and regex.fullmatch(str(pattern)) not in (regex.EMPTY, regex.NOTHING):
            space = self._terminal(f"{slashed(str(pattern))} & /(?s:.+)/", "SPACE") + "?"
        self._comma, self._colon = f'{space} "," {space}', f'{space} ":" {space}'
        self._before, self._after = f" {space} ", f" {space} "

    # --- what has other forms ---

    def _varies(self, node: Any) -> bool:
        """Whether values of a node, inner ones aside, may be written in more than one way."""
        if not isinstance(node, dict):
            return False
        if "enum" in node:
            return any(map(self._value_varies, node["enum"]))
        kinds = node.get("type", ())
        if self._whole_fractions and "integer" in ((kinds,) if isinstance(kinds, str) else kinds):
            return True
        if kinds != "object" or _is_counted(node):
            return False
        num_keys = sum(each is not False for each in node.get("properties", {}).values())
        num_free = int(node.get("additionalProperties", True) is not False)
        num_free += len(node.get("patternProperties", ()))
        return 0 < num_keys <= MAX_UNORDERED and num_keys + num_free > 1

    def _value_varies(self, value: Any) -> bool:
        if isinstance(value, list):
            return any(map(self._value_varies, value))
        if isinstance(value, dict):
            return 1 < len(value) <= MAX_UNORDERED or any(map(self._value_varies, value.values()))
        return self._whole_fractions and _is_whole(value) and abs(value) <= _MAX_DOUBLE_INT

    def _is_plain(self, node: Any) -> bool:
        """Whether llguidance's own grammar says all: nothing inside varies, or is elsewhere."""
        if not isinstance(node, dict):
            return True
        if id(node) not in self._plain:
            alone = "$ref" not in node and not self._varies(node)
            found = alone and all(map(self._is_plain, inner(_without_defs(node))))
            self._plain[id(node)] = node, found
        return self._plain[id(node)][1]

    # --- rules ---

    def _rule(self, text: str) -> str:
        name = self._named.get(text)
        if name is None:
            name = self._named[text] = f"value_{len(self._named)}"
            self._texts[name] = text
            if len(self._named) > MAX_RULES:
                raise _Beyond
        return name

    def _terminal(self, text: str, name: str = "KEY") -> str:
        return self._terminals.setdefault(text, f"{name}_{len(self._terminals)}")

    def _either(self, options: Sequence[str]) -> str:
        if not options:
            raise _Beyond  # nothing would be read as the empty text
        return self._rule(" | ".join(dict.fromkeys(options)))

    def _own(self, node: Any) -> str:
        """The rule of what llguidance compiles by itself."""
        return self._rule(f"%json {json_text(node, self._options)}")

    def _value(self, node: Any) -> str:
        if node is False:
            raise _Beyond
        if self._is_plain(node):
            return self._own(node if node is True else _without_defs(node))
        node = _without_defs(node)
        if "$ref" in node:
            return self._reference(node["$ref"].removeprefix(REFERENCE))
        if "anyOf" in node:
            return self._either([self._value(each) for each in node["anyOf"] if each is not False])
        if "enum" in node:
            return self._either(self._listed(node["enum"]))
        kind = node["type"]
        if isinstance(kind, list):
            return self._either([self._value({**node, "type": each}) for each in kind])
        if kind == "integer":
            return self._integer(node)
        return self._array(node) if kind == "array" else self._object(node)

    def _reference(self, name: str) -> str:
        if name not in self._of_defs:
            self._of_defs[name] = f"def_{len(self._of_defs)}"
            self._waiting.append(name)
        return self._of_defs[name]

    # --- numbers and listed values ---

    def _integer(self, node: Node) -> str:
        low, high = node.get("minimum"), node.get("maximum")
        least, most = _within(low, -_MOST), _within(high, _MOST)
        if node.keys() <= {"type", "minimum", "maximum"}:
            # One terminal: beside other numbers, the lexer goes on as far as any of them does.
            short = whole_numbers.between(least, most)
            alike = rf"|(?:{short})\.0" if short else ""
            return self._rule(f"/(?:{whole_numbers.between(low, high)}{alike})/")
        if most - least < node.get("multipleOf", 1):  # there may be none
            return self._own(node)
        return self._rule(
            f'{self._own(node)} | {self._own({**node, "minimum": least, "maximum": most})} ".0"'
        )

    def _listed(self, values: list[Any]) -> list[str]:
        whole = [value for value in values if _is_whole(value)]
        if any(isinstance(value, float) and abs(value) > _MAX_DOUBLE_INT for value in whole):
            raise _Beyond  # its digits may not be those that were meant
        found = [self._whole_number(int(value)) for value in whole]
        plain = [v for v in values if not _is_whole(v) and not self._value_varies(v)]
        found += [self._own({"enum": plain})] if plain else []
        varied = (v for v in values if isinstance(v, list | dict) and self._value_varies(v))
        return found + [self._value(_as_schema(value)) for value in varied]

    def _whole_number(self, value: int) -> str:
        alike = self._whole_fractions and abs(value) <= _MAX_DOUBLE_INT
        return rf"/{value}(?:\.0)?/" if alike else f"/{value}/"

    # --- lists ---

    def _array(self, node: Node) -> str:
        prefix, rest = node.get("prefixItems", []), node.get("items", True)
        if False in prefix:
            prefix, rest = prefix[: prefix.index(False)], False
        low, high = node.get("minItems", 0), node.get("maxItems")
        if rest is False:
            high = len(prefix) if high is None else min(high, len(prefix))
        if high is not None and low > high:
            raise _Beyond
        prefix = prefix if high is None else prefix[:high]
        items = [self._value(each) for each in prefix]
        more = 0 if high is None else high - len(items)
        tail = ""
        if high is None or more:
            least = max(0, low - len(items))
            tail = self._row(self._value(rest), least, None if high is None else more, bool(items))
        for number in range(len(items), 0, -1):
            part = (
                f"{self._comma} {items[number - 1]} {tail}" if number > 1 else f"{items[0]} {tail}"
            )
            tail = self._rule(part) + ("" if number <= low else "?")
        return self._rule(f'"[" {self._before} {tail} {self._after} "]"')

    def _row(self, item: str, low: int, high: int | None, behind: bool) -> str:
        """So many of an item, each behind a comma; the first without one unless `behind` others."""
        if high is not None and low > high:
            raise _Beyond
        if high == 0:
            return ""
        if behind:
            return f"({self._comma} {item}){_count(low, high)}"
        least = max(0, low - 1)
        more = "" if high == 1 else f"({self._comma} {item})"
        more += _count(least, None if high is None else high - 1) if more else ""
        return f"({item} {more})" + ("" if low else "?")

    # --- objects ---

    def _object(self, node: Node) -> str:
        members = {
            name: f"{quoted(compact(name))} {self._colon} {self._value(each)}"
            for name, each in node.get("properties", {}).items()
            if each is not False
        }
        required = [name in node.get("required", ()) for name in members]
        if not members.keys() >= set(node.get("required", ())):
            raise _Beyond
        free = self._free(node)
        low, high = node.get("minProperties", 0), node.get("maxProperties")
        if _is_counted(node):
            if not all(required):
                raise _Beyond  # which keys are counted is not told by the grammar
            low, high = max(0, low - len(required)), None if high is None else high - len(required)
            if (high is not None and low > high) or (low and not free):
                raise _Beyond
        texts = [self._rule(text) for text in members.values()]
        if len(texts) > MAX_UNORDERED or _is_counted(node):
            body = self._ordered(texts, required, free, low, high)
        else:
            body = self._unordered(texts, required, free)
        return self._rule(f'"{{" {self._before} {body} {self._after} "}}"')

    def _free(self, node: Node) -> str:
        """One key that is not named, and its value; empty where there may be none."""
        names = list(node.get("properties", ()))
        patterns = node.get("patternProperties", {})
        wanted = [
            (self._matching(p, names), each) for p, each in patterns.items() if each is not False
        ]
        rest = node.get("additionalProperties", True)
        if rest is not False:
            wanted.append((self._others(names, list(patterns)), rest))
        found = [f"{key} {self._colon} {self._value(each)}" for key, each in wanted if key]
        return self._either(found) if found else ""

    def _others(self, names: list[str], patterns: list[str]) -> str:
        """A key that is none of the names, and matches none of the patterns."""
        if not patterns:
            but = " | ".join(quoted(compact(name)) for name in names)
            return self._terminal(f"{_STRING} & ~({but})" if names else _STRING)
        outside = [automata.complement(regex.search(pattern)) for pattern in patterns]
        return self._key([derive.without(names), *outside])

    def _matching(self, pattern: str, names: list[str]) -> str:
        """A key that matches a pattern, and is none of the names."""
        return self._key([derive.without(names), regex.search(pattern)])

    def _key(self, nodes: list[regex.Node | None]) -> str:
        """A key in all the languages; empty where there is none."""
        known = tuple(regex.spelled(node) for node in nodes if node is not None)
        joint = automata.intersection(known) if len(known) == len(nodes) else None
        if joint is None:
            raise _Beyond
        if joint == regex.NOTHING:
            return ""
        return self._own({"type": "string", "pattern": regex.anchored(joint)})

    def _ordered(
        self, texts: list[str], required: list[bool], free: str, low: int, high: int | None
    ) -> str:
        """Keys in the order of the schema, then those that are free."""
        behind = self._row(free, low, high, True) if free else ""
        starts = [self._row(free, max(low, 1), high, False)] if free and high != 0 else []
        starts += [] if low else [""]
        for text, needed in zip(reversed(texts), reversed(required), strict=True):
            starts = [f"{text} {behind}", *(() if needed else starts)]
            behind = self._rule(f"({self._comma} {text}){'' if needed else '?'} {behind}")
        return self._either(starts)

    def _unordered(self, texts: list[str], required: list[bool], free: str) -> str:
        """Keys in any order, free ones among them: a rule for each set that may still come."""
        numbers = range(len(texts))
        behind: dict[int, str] = {}
        row = self._row(free, 0, None, True) if free else ""
        for left in range(1 << len(texts)):  # a set comes behind those within it
            due = any(required[i] for i in numbers if left >> i & 1)
            options = [
                f"{self._comma} {texts[i]} {behind[left ^ 1 << i]}"
                for i in numbers
                if left >> i & 1
            ]
            if not left:
                behind[left] = row
                continue
            one = self._either(options) + ("" if due else "?")
            behind[left] = self._rule(f"{row} {one}")
        every = (1 << len(texts)) - 1
        starts = [f"{texts[i]} {behind[every ^ 1 << i]}" for i in numbers]
        starts += [f"{free} {behind[every]}"] if free else []
        return self._either([*starts, *(() if any(required) else ("",))])


def _parts(schema: Any) -> Iterator[Any]:
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += inner(node)


def _without_defs(node: Node) -> Node:
    return (
        {key: value for key, value in node.items() if key != "$defs"} if "$defs" in node else node
    )


def _is_counted(node: Node) -> bool:
    return "minProperties" in node or "maxProperties" in node


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool | str) and is_integer(value)


def _as_schema(value: Any) -> Node:
    """The schema of a listed list or object."""
    if isinstance(value, list):
        items = [{"enum": [each]} for each in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    properties = {name: {"enum": [each]} for name, each in value.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(value),
        "additionalProperties": False,
    }


def _within(bound: int | None, least_or_most: int) -> int:
    """A bound that is no further from zero than another."""
    if bound is None:
        return least_or_most
    return max(bound, least_or_most) if least_or_most < 0 else min(bound, least_or_most)


def _count(low: int, high: int | None) -> str:
    if high is None:
        return "*" if low == 0 else f"{{{low},}}"
    return f"{{{low},{high}}}"
