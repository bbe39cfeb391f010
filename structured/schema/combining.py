"""The keywords that apply schemas to the value itself: references, allOf, anyOf, oneOf, not, if."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from plait.structured.schema.atoms import (
    NEVER,
    Alternatives,
    Literal,
    Property,
    Required,
    Untold,
)
from plait.structured.schema.branches import (
    ALWAYS,
    NEITHER,
    TooManyBranches,
    absorbed,
    conjunction,
    union,
    unseen,
)
from plait.structured.schema.limits import escape
from plait.structured.schema.refusal import Refusal

if TYPE_CHECKING:
    from plait.structured.schema.reading import Reader

_MAX_EXCLUSIVE = 6  # anyOf members of which each subset is a branch of its own
_MAX_ALONE = 4_096  # ways in which only one member of oneOf holds: beyond, some are chosen
_MAX_KEPT = 12
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
APPLYING = frozenset(
    {
        *_REFERENCES,
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "dependentSchemas",
        "dependencies",
    }
)


class Combiner:
    """What those keywords say in one document, told by the reader of their members."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._disjoint: dict[tuple[Literal, Literal, str], bool] = {}

    def groups(
        self, at: str, schema: dict[str, Any], kind: str, apart: bool, positive: bool
    ) -> list[Alternatives]:
        """One group of alternatives for each such keyword of the schema at a pointer."""
        if APPLYING.isdisjoint(schema):
            return []
        groups = [
            self._reader.reference(at, keyword, kind, apart=apart, positive=positive)
            for keyword in _REFERENCES
            if keyword in schema
        ]
        if "allOf" in schema:
            members = self._members(at, schema, "allOf")
            literals = [Literal(pointer, positive) for pointer in members]
            groups += [self._reader.alternatives(each, kind, apart=apart) for each in literals]
        if "anyOf" in schema:
            groups.append(self._any_of(self._members(at, schema, "anyOf"), kind, apart, positive))
        if "oneOf" in schema:
            groups.append(self._one_of(self._members(at, schema, "oneOf"), kind, apart, positive))
        if "not" in schema:
            inner = self._reader.alternatives(Literal(f"{at}/not", not positive), kind)
            groups.append(unseen(inner))
        if "if" in schema and ("then" in schema or "else" in schema or apart):
            groups.append(self._conditional(at, schema, kind, apart, positive))
        if kind == "object":
            groups += self._dependent(at, schema, apart, positive)
        return groups

    def _members(self, at: str, schema: dict[str, Any], keyword: str) -> list[str]:
        members = schema[keyword]
        if not isinstance(members, list) or not members:
            raise self._reader.invalid(f"{at}/{keyword}", f"{keyword!r} is a list of schemas")
        return [f"{at}/{keyword}/{i}" for i in range(len(members))]

    def _any_of(self, members: list[str], kind: str, apart: bool, positive: bool) -> Alternatives:
        limit = self._reader.limits.max_alternatives
        if not positive:
            return self._reader.joint([self._no(p, kind) for p in members], kind)
        if not apart:
            return union([self._yes(p, kind, apart) for p in members], limit)
        live = [p for p in members if self._yes(p, kind, apart)]
        if len(live) > _MAX_EXCLUSIVE:
            raise TooManyBranches
        found = []
        for chosen in itertools.product((True, False), repeat=len(live)):
            if any(chosen):
                groups = [
                    self._yes(p, kind, apart) if yes else self._no(p, kind)
                    for p, yes in zip(live, chosen, strict=True)
                ]
                found.append(self._living(groups, kind))
        return union(found, limit)

    def _living(self, groups: list[Alternatives], kind: str) -> Alternatives:
        return self._reader.alive(self._reader.joint(groups, kind), kind)

    def _yes(self, pointer: str, kind: str, apart: bool) -> Alternatives:
        return self._reader.alternatives(Literal(pointer, True), kind, apart=apart)

    def _no(self, pointer: str, kind: str) -> Alternatives:
        return self._reader.alternatives(Literal(pointer, False), kind)

    def _one_of(self, members: list[str], kind: str, apart: bool, positive: bool) -> Alternatives:
        limit = self._reader.limits.max_alternatives
        live = [p for p in members if self._reader.alive(self._yes(p, kind, apart), kind)]
        if not positive:
            none = self._reader.joint([self._no(p, kind) for p in live], kind)
            pairs = [
                self._reader.joint([self._yes(p, kind, apart), self._yes(q, kind, apart)], kind)
                for p, q in itertools.combinations(live, 2)
                if not self._are_disjoint(p, q, kind)
            ]
            return union([none, *pairs], limit)
        found = []
        for p in live:
            others = [q for q in live if q != p and not self._are_disjoint(p, q, kind)]
            yes = self._yes(p, kind, apart)
            found.append(self._alone(p, yes, [self._no(q, kind) for q in others], kind))
        return union(found, limit)

    def _alone(
        self, at: str, yes: Alternatives, denied: list[Alternatives], kind: str
    ) -> Alternatives:
        """The branches of a member of oneOf in which no other member holds."""
        if not denied:
            return yes
        groups = [yes, *sorted(denied, key=len)]
        if math.prod(map(len, groups)) <= _MAX_ALONE or self._reader.document.has_unevaluated:
            return self._reader.told(self._living(groups, kind), kind)
        found = yes
        for group in groups[1:]:
            self._reader.spend(len(found) * len(group) // 8)
            found = self._shortest(at, conjunction([found, group], 1 << 16), kind)
        return self._reader.told(found, kind)

    def _shortest(self, at: str, found: Alternatives, kind: str) -> Alternatives:
        """The branches that say least, up to a number."""
        kept: Alternatives = []
        for branch in absorbed(found):
            if self._reader.merger.is_dead(branch, kind):
                continue
            kept.append(branch)
            if len(kept) == _MAX_KEPT:
                why = "of the many ways in which only one member holds, some are left out"
                refusal = Refusal(at, "oneOf", why, "say 'anyOf'", denial=True)
                return [*kept, (Untold(refusal, whole=False),)]
        return kept

    def _are_disjoint(self, p: str, q: str, kind: str) -> bool:
        one, other = sorted((Literal(p, True), Literal(q, True)))
        key = (one, other, kind)
        if key not in self._disjoint:
            reader = self._reader
            lefts, rights = reader.alternatives(one, kind), reader.alternatives(other, kind)
            reader.spend(len(lefts) * len(rights))
            self._disjoint[key] = all(
                reader.merger.is_dead(branch, kind)
                for left, right in itertools.product(lefts, rights)
                for branch in conjunction([[left], [right]], 1)
            )
        return self._disjoint[key]

    def _conditional(
        self, at: str, schema: dict[str, Any], kind: str, apart: bool, positive: bool
    ) -> Alternatives:
        limit = self._reader.limits.max_alternatives
        yes = self._yes(f"{at}/if", kind, apart)
        no = self._no(f"{at}/if", kind)

        def outcome(keyword: str) -> Alternatives:
            if keyword not in schema:
                return ALWAYS if positive else NEITHER
            literal = Literal(f"{at}/{keyword}", positive)
            return self._reader.alternatives(literal, kind, apart=apart)

        parts = [([yes, outcome("then")]), ([no, outcome("else")])]
        found = [self._living(groups, kind) for groups in parts]
        if positive:
            found = [self._reader.told(each, kind) for each in found]
        return union(found, limit)

    def _dependent(
        self, at: str, schema: dict[str, Any], apart: bool, positive: bool
    ) -> list[Alternatives]:
        groups = []
        for keyword in ("dependentSchemas", "dependencies"):
            members = schema.get(keyword, {})
            if not isinstance(members, dict):
                raise self._reader.invalid(f"{at}/{keyword}", f"{keyword!r} maps keys to schemas")
            for name, inner in members.items():
                if isinstance(inner, list | str):
                    continue
                pointer = f"{at}/{keyword}/{escape(name)}"
                then = self._reader.alternatives(Literal(pointer, positive), "object", apart=apart)
                there: Alternatives = [(Required(name),)]
                met = self._reader.joint([there, then], "object")
                absent: Alternatives = [(Property(name, NEVER, seen=False),)]
                groups.append([*absent, *met] if positive else met)
        return groups
