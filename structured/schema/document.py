"""A schema with its addresses: pointers, identifiers, anchors, and what a reference means."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from plait.platform.errors import InvalidSchema
from plait.structured.schema.limits import escape, unescape
from plait.structured.schema.refusal import Refusal, Undecidable

# Where schemas lie inside a schema.
_SINGLE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = (
    "$defs",
    "definitions",
    "properties",
    "patternProperties",
    "dependentSchemas",
    "dependencies",
)
# With the order in which they are walked through.
_HOLDING = {key: place for place, key in enumerate((*_SINGLE, *_LISTS, *_MAPS))}
_NAMING = frozenset({"$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})
LEGACY = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
OLD_IDS = ("draft-03", "draft-04", "draft-05")


class Document:
    """One schema document.

    `legacy`: before 2019-09, where `$ref` hides its siblings. A dialect by a name that is not its
    own, such as one with https, is not known to validators, which then do not hide them.
    """

    def __init__(self, root: Any, param: str, text: str | None = None) -> None:
        """`text`: the same as JSON, where it is at hand."""
        self.root = root
        self.param = param
        dialect = root.get("$schema", "") if isinstance(root, dict) else ""
        named = isinstance(dialect, str) and dialect.startswith("http://json-schema.org/")
        self.legacy = named and any(each in dialect for each in LEGACY)
        # Since 2020-12 what `contains` finds counts as evaluated.
        self.contains_evaluates = not self.legacy and "2019-09" not in str(dialect)
        # What branches look at matters only where something asks for what none looked at.
        self.has_unevaluated = '"unevaluated' in (text or json.dumps(root))
        self._id = "id" if any(each in str(dialect) for each in OLD_IDS) else "$id"
        self._bases: dict[str, str] = {}
        self._resources: dict[str, str] = {}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: dict[str, list[str]] = {}
        self._targets: dict[tuple[str, str], str] = {}
        self._nodes: dict[str, Any] = {}
        self._inner: dict[str, list[tuple[str, Any]]] = {}
        self.starts = [""]  # the root, and what references found where no keyword leads
        self._index("", root, "")

    def _index(self, start: str, schema: Any, base: str) -> None:
        waiting = [(start, schema, base)]
        while waiting:
            at, schema, base = waiting.pop()
            self._nodes[at] = schema
            if not isinstance(schema, dict):
                continue
            base = self._name(at, schema, base)
            self._bases[at] = base
            self._inner[at] = inner = children(at, schema)
            waiting += [(*child, base) for child in inner]

    def _name(self, at: str, schema: dict[str, Any], base: str) -> str:
        if at and _NAMING.isdisjoint(schema):
            return base
        own = schema.get(self._id)
        hidden = self.legacy and "$ref" in schema
        if isinstance(own, str) and not hidden:
            address, fragment = urldefrag(urljoin(base, own))
            if own.startswith("#"):
                self._anchors[(base, fragment)] = at
            else:
                base = address
                self._resources.setdefault(base, at)
        if at == "":
            self._resources.setdefault("", at)
            self._resources.setdefault(base, at)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := schema.get(keyword), str):
                self._anchors[(base, name)] = at
        if isinstance(name := schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(name, []).append(at)
        if schema.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("", []).append(at)
        return base

    def walk(self) -> list[tuple[str, dict[str, Any]]]:
        """All schemas but true and false that are known of, with their pointers, in order."""
        found, waiting = [], [(at, self._nodes[at]) for at in reversed(self.starts)]
        while waiting:
            at, schema = waiting.pop()
            if isinstance(schema, dict):
                found.append((at, schema))
                waiting += reversed(self._inner[at])
        return found

    def inner(self, at: str) -> list[tuple[str, Any]]:
        """The schemas directly inside the schema at a pointer, with theirs."""
        return self._inner.get(at, [])

    def at(self, pointer: str) -> Any:
        """The schema at a pointer that `resolve` or `children` gave."""
        if pointer not in self._nodes:
            self._nodes[pointer] = self._walk(pointer)
        return self._nodes[pointer]

    def is_reference(self, schema: dict[str, Any]) -> bool:
        """Whether a schema says what another does, and no more."""
        if not isinstance(schema.get("$ref"), str):
            return False
        return len(schema) == 1 or self.legacy

    def _walk(self, pointer: str) -> Any:
        node = self.root
        for step in pointer.split("/")[1:]:
            key = unescape(step)
            if isinstance(node, dict):
                node = node[key]
            elif isinstance(node, list):
                node = node[int(key)]
            else:
                raise KeyError(pointer)
        return node

    def _base(self, pointer: str) -> str:
        while pointer not in self._bases and pointer:
            pointer = pointer.rpartition("/")[0]
        return self._bases.get(pointer, "")

    def resolve(self, at: str, keyword: str, ref: str) -> str:
        """The pointer that a reference standing at `at` means.

        Raises `Undecidable` where it leads outside of the document, or depends on the way there.
        """
        if keyword in ("$dynamicRef", "$recursiveRef"):
            name = urldefrag(ref)[1]
            if len(self._dynamic.get(name, ())) > 1 and self._is_dynamic(at, ref, name):
                raise self._refused(at, keyword, "its target depends on the way to it")
        base = self._base(at)
        key = (base, ref)
        if keyword != "$ref" or key not in self._targets:
            self._targets[key] = self._resolve(at, base, keyword, ref)
        return self._targets[key]

    def _resolve(self, at: str, base: str, keyword: str, ref: str) -> str:
        # Names such as urn:… cannot be joined, but fragments mean their own resource.
        address, fragment = urldefrag(base + ref if ref.startswith("#") else urljoin(base, ref))
        if address not in self._resources:
            raise self._refused(at, keyword, f"{ref!r} lies outside of the schema")
        resource = self._resources[address]
        fragment = unquote(fragment)
        missing = f"{keyword!r} at {at or '/'}: there is no {ref!r}"
        if fragment and not fragment.startswith("/"):
            if (address, fragment) not in self._anchors:
                raise InvalidSchema(missing, param=self.param)
            return self._anchors[(address, fragment)]
        return self._within(resource, fragment, missing)

    def _is_dynamic(self, at: str, ref: str, name: str) -> bool:
        address, _ = urldefrag(urljoin(self._base(at), ref))
        target = self._anchors.get((address, name), self._resources.get(address, ""))
        return not name or target in self._dynamic[name]

    def _within(self, resource: str, fragment: str, missing: str) -> str:
        pointer = resource + "".join(
            f"/{escape(unescape(step))}" for step in fragment.split("/")[1:]
        )
        try:
            schema = self.at(pointer)
        except (KeyError, IndexError, ValueError):
            raise InvalidSchema(missing, param=self.param) from None
        if not isinstance(schema, dict | bool):
            raise InvalidSchema(f"{missing} that is a schema", param=self.param)
        if pointer not in self._bases:
            # A pointer may pass another resource on its way, or lead where no keyword leads.
            self._index(pointer, schema, self._base(pointer))
            self.starts.append(pointer)
        return pointer

    def _refused(self, at: str, keyword: str, why: str) -> Undecidable:
        instead = "copy what it means into $defs and refer to it by '#/$defs/…'"
        return Undecidable(Refusal(f"{at}/{escape(keyword)}", keyword, why, instead))


def children(at: str, schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """The schemas directly inside a schema, with their pointers."""
    holding = [key for key in schema if key in _HOLDING]
    if not holding:
        return []
    found: list[tuple[str, Any]] = []
    for key in sorted(holding, key=_HOLDING.__getitem__) if len(holding) > 1 else holding:
        inner = schema[key]
        if isinstance(inner, dict):
            if key in _MAPS:
                found += [(f"{at}/{key}/{escape(str(name))}", inner[name]) for name in inner]
            elif key in _SINGLE:
                found.append((f"{at}/{key}", inner))
        elif isinstance(inner, list) and key in _LISTS:
            found += [(f"{at}/{key}/{i}", each) for i, each in enumerate(inner)]
    return found
