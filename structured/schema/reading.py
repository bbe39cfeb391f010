"""A schema read into alternatives of atoms, for one JSON type at a time, affirmed or denied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection
from typing import Any

from plait.platform.errors import GrammarTooComplex, InvalidSchema
from plait.structured.schema import holding, keywords, unevaluated
from plait.structured.schema.atoms import (
    NEVER,
    TRUE,
    Alternatives,
    Branch,
    Formula,
    Fractional,
    Integer,
    Literal,
    NotValues,
    Poison,
    Property,
    Required,
    Untold,
    Values,
)
from plait.structured.schema.branches import (
    ALWAYS,
    NEITHER,
    Circle,
    TooManyBranches,
    absorbed,
    conjunction,
    joined,
    optional,
    union,
    unseen,
)
from plait.structured.schema.document import Document
from plait.structured.schema.limits import Limits, escape
from plait.structured.schema.merging import Merger
from plait.structured.schema.refusal import Refusal, Undecidable
from plait.structured.schema.shapes import Refused
from plait.structured.schema.values import TYPES, identity, type_of

_MAX_EXCLUSIVE = 6  # anyOf members of which each subset is a branch of its own
_MAX_ALONE = 4_096  # ways in which only one member of oneOf holds: beyond, some are chosen
_MAX_KEPT = 12
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_APPLYING = frozenset(
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


class Reader:
    """Reads one document. Everything is remembered, so that shared parts are read once."""

    def __init__(self, document: Document, limits: Limits) -> None:
        self.document = document
        self.limits = limits
        self.originals: dict[str, Any] = {}  # values by identity, as the schema writes them
        self.notes: dict[str, None] = {}
        self.merger = Merger(self)
        self._spent = 0
        self._known: dict[tuple[Literal, str, bool], Alternatives] = {}
        self._open: set[tuple[Literal, str, bool]] = set()
        self._conjunctions: dict[tuple[Formula, ...], Formula] = {}
        self._of_formulas: dict[tuple[Formula, str], Alternatives] = {}
        self._named: dict[str, Collection[str]] = {}
        self._disjoint: dict[tuple[Literal, Literal, str], bool] = {}

    def spend(self, amount: int) -> None:
        """Count work. Raises `GrammarTooComplex` where a schema takes more than its share."""
        self._spent += amount
        if self._spent > self.limits.max_work:
            raise GrammarTooComplex(
                "too complex: the schema takes too long to unfold; nest fewer oneOf, anyOf, not "
                "and if",
                param=self.document.param,
            )

    # --- formulas ---

    def formula(self, pointer: str) -> Formula:
        """The schema at a pointer as a formula."""
        schema = self.document.at(pointer)
        if schema is True or schema == {}:
            return TRUE
        if schema is False:
            return NEVER
        if not isinstance(schema, dict):
            raise self.invalid(pointer, "a schema is an object, true or false")
        return frozenset({Literal(pointer, True)})

    def denied(self, formula: Formula) -> Formula:
        """The denial of the formula of one schema."""
        if formula == TRUE:
            return NEVER
        if formula == NEVER:
            return TRUE
        (literal,) = formula
        return frozenset({Literal(literal.pointer, not literal.positive)})

    def both(self, *formulas: Formula) -> Formula:
        """The conjunction; contradictions are NEVER."""
        if len(formulas) == 1:
            return formulas[0]
        found = self._conjunctions.get(formulas)
        if found is None:
            found = self._conjunctions[formulas] = self._both(formulas)
        return found

    def _both(self, formulas: tuple[Formula, ...]) -> Formula:
        found = frozenset[Literal]().union(*formulas)
        if found >= NEVER or any(Literal(p, not positive) in found for p, positive in found):
            return NEVER
        return found

    def branches(self, formula: Formula, kind: str) -> Alternatives:
        """The alternatives of a formula among values of one type."""
        if formula == NEVER:
            return NEITHER
        key = (formula, kind)
        found = self._of_formulas.get(key)
        if found is None:
            found = self._of_formulas[key] = self._branches(formula, kind)
        return found

    def kinds(self, formula: Formula) -> tuple[str, ...]:
        """The JSON types that values of a formula may have, as far as its schemas name them."""
        found: tuple[str, ...] = () if formula == NEVER else TYPES
        for pointer, positive in formula if found else ():
            named = self._kinds_of(pointer) if positive else TYPES
            if named != TYPES:
                found = tuple(kind for kind in found if kind in named)
        return found

    def _branches(self, formula: Formula, kind: str) -> Alternatives:
        if len(formula) == 1:
            (literal,) = formula
            found = self.alternatives(literal, kind)
            return found if len(found) <= 1 else self._joint([found], kind)
        ordered = sorted(formula, key=lambda each: (not each.positive, len(each.pointer), each))
        try:
            groups = [self.alternatives(literal, kind) for literal in ordered]
            return self._joint(groups, kind)
        except TooManyBranches:
            raise self._too_many(ordered[0].pointer if ordered else "") from None

    def holds(self, formula: Formula, value: Any) -> bool:
        """Whether a value fulfils a formula. Raises `Undecidable`."""
        return formula != NEVER and all(
            holding.any_holds(self, self.alternatives(literal, type_of(value)), value)
            for literal in formula
        )

    def is_empty(self, formula: Formula) -> bool:
        """Whether surely no value fulfils a formula."""
        return self.merger.is_empty(formula)

    def invalid(self, pointer: str, message: str) -> InvalidSchema:
        """The error for a schema that is none."""
        return InvalidSchema(f"{pointer or '/'}: {message}", param=self.document.param)

    def keep(self, value: Any) -> str:
        """The identity of a value, whose spelling is remembered."""
        text = identity(value)
        self.originals.setdefault(text, value)
        return text

    # --- alternatives ---

    def alternatives(self, literal: Literal, kind: str, *, apart: bool = False) -> Alternatives:
        """What a literal says of values of a type. `apart`: so that just one branch can hold.

        Unevaluated keys and items depend on which members of an anyOf hold; where they are asked
        for, each combination is a branch of its own.
        """
        apart = apart and kind in ("object", "array")
        key = (literal, kind, apart)
        if key in self._known:
            return self._known[key]
        if literal.positive and not self._may_be(literal.pointer, kind):
            return NEITHER
        if key in self._open:
            at = literal.pointer or "/"
            message = f"{at}: the schema refers to itself without end"
            raise Circle(message, param=self.document.param)
        self._open.add(key)
        try:
            if literal.positive:
                found = self._affirm(literal.pointer, kind, apart)
            else:
                found = self._denial(literal.pointer, kind)
        except TooManyBranches:
            raise self._too_many(literal.pointer) from None
        finally:
            self._open.discard(key)
        self._known[key] = found
        return found

    def _may_be(self, pointer: str, kind: str) -> bool:
        """Whether the `type` of a schema allows a JSON type: what rules most of them out."""
        return kind in self._kinds_of(pointer)

    def _kinds_of(self, pointer: str) -> Collection[str]:
        """The JSON types that a schema names or lists at once; all where it does neither."""
        found = self._named.get(pointer)
        if found is None:
            self._named[pointer] = TYPES  # a circle of references rules nothing out
            found = self._named[pointer] = self._find_kinds(pointer)
        return found

    def _find_kinds(self, pointer: str) -> Collection[str]:
        schema = self.document.at(pointer)
        if not isinstance(schema, dict):
            return TYPES
        if self._is_reference(schema):
            return self._kinds_behind(pointer, schema["$ref"])
        named = schema.get("type")
        if isinstance(named, str) and schema.get("nullable") is not True:
            named = "number" if named == "integer" else named
            return (named,) if named in TYPES else TYPES
        if "type" in schema:
            return TYPES
        if "const" in schema:
            return (type_of(schema["const"]),)
        enum = schema.get("enum")
        return frozenset(map(type_of, enum)) if isinstance(enum, list) else TYPES

    def _kinds_behind(self, pointer: str, ref: str) -> Collection[str]:
        try:
            target = self.document.resolve(pointer, "$ref", ref)
        except Undecidable:
            return TYPES
        return self._kinds_of(target)

    def _is_reference(self, schema: dict[str, Any]) -> bool:
        """Whether a schema says what another does, and no more."""
        if not isinstance(schema.get("$ref"), str):
            return False
        return len(schema) == 1 or self.document.legacy

    def _too_many(self, pointer: str) -> GrammarTooComplex:
        return GrammarTooComplex(
            f"{pointer or '/'}: the schema unfolds into more than "
            f"{self.limits.max_alternatives} alternatives here; say 'anyOf' for 'oneOf', tell its "
            "members apart by a required property with a 'const' of its own, or combine fewer "
            "anyOf, not and if",
            param=self.document.param,
        )

    def _affirm(self, at: str, kind: str, apart: bool) -> Alternatives:
        schema = self.document.at(at)
        if isinstance(schema, bool):
            return ALWAYS if schema else NEITHER
        if isinstance(schema, dict) and self._is_reference(schema):
            return self._reference(at, "$ref", kind, apart, True)
        inner = unevaluated.keyword_of(schema, kind)
        groups = self._groups(at, kind, apart or inner is not None, positive=True)
        found = self._joint(groups, kind)
        if "not" in schema:
            found = self._told(found, kind)
        return unevaluated.affirmed(self, at, inner, found) if inner else found

    def _denial(self, at: str, kind: str) -> Alternatives:
        try:
            return self._deny(at, kind)
        except TooManyBranches:
            why = f"its denial unfolds into more than {self.limits.max_alternatives} alternatives"
            instead = "if 'oneOf' asks for that, say 'anyOf'; else say what is allowed"
            refusal = Refusal(at, "not", why, instead, denial=True)
            return [(Poison(refusal),)]

    def _deny(self, at: str, kind: str) -> Alternatives:
        schema = self.document.at(at)
        if isinstance(schema, bool):
            return NEITHER if schema else ALWAYS
        groups = self._groups(at, kind, False, positive=False)
        if inner := unevaluated.keyword_of(schema, kind):
            rest = self._joint(self._groups(at, kind, True, positive=True), kind)
            groups.append(unevaluated.denied(self, at, inner, rest))
        return optional(unseen(union(groups, self.limits.max_alternatives)))

    def _groups(self, at: str, kind: str, apart: bool, *, positive: bool) -> list[Alternatives]:
        """One group of alternatives for each keyword; to be joined, or united where denied."""
        schema = self.document.at(at)
        if not isinstance(schema, dict):
            raise self.invalid(at, "a schema is an object, true or false")
        if self.document.legacy and "$ref" in schema:
            return [self._reference(at, "$ref", kind, apart, positive)]
        typed = self._type(at, schema, kind, positive)
        if positive and typed == NEITHER:
            return [NEITHER]
        if not positive and typed == ALWAYS:
            return [ALWAYS]
        groups = [typed, *self._listed(at, schema, kind, positive)]
        groups += keywords.groups(self, at, schema, kind, positive)
        groups += self._applied(at, schema, kind, apart, positive)
        return groups

    def _type(self, at: str, schema: dict[str, Any], kind: str, positive: bool) -> Alternatives:
        if schema.get("type", kind) == kind:
            return ALWAYS if positive else NEITHER
        named = schema["type"]
        names = {named} if isinstance(named, str) else named
        if not isinstance(named, str | list) or not all(isinstance(n, str) for n in names):
            raise self.invalid(f"{at}/type", "'type' is a name or a list of names")
        names = set(names)
        if self.document.legacy and "any" in names:
            names = set(TYPES)
        if unknown := names - {*TYPES, "integer"}:
            raise self.invalid(f"{at}/type", f"there is no type {min(unknown)!r}")
        if schema.get("nullable") is True and "type" in schema:
            names.add("null")
        if kind in names:
            return ALWAYS if positive else NEITHER
        if kind != "number" or "integer" not in names:
            return NEITHER if positive else ALWAYS
        if positive:
            return [(Integer(),)]
        return [
            (
                Fractional(
                    Refusal(
                        f"{at}/type",
                        "type",
                        "numbers that are no integers cannot be told apart from integers",
                        "say 'anyOf' for 'oneOf', or 'number' alone, which integers are too",
                        denial=True,
                    )
                ),
            )
        ]

    def _listed(
        self, at: str, schema: dict[str, Any], kind: str, positive: bool
    ) -> list[Alternatives]:
        lists = []
        if "const" in schema:
            lists.append([schema["const"]])
        if "enum" in schema:
            if not isinstance(schema["enum"], list):
                raise self.invalid(f"{at}/enum", "'enum' is a list")
            lists.append(schema["enum"])
        groups: list[Alternatives] = []
        for values in lists:
            kept = tuple(dict.fromkeys(self.keep(v) for v in values if type_of(v) == kind))
            if positive:
                groups.append([(Values(kept),)] if kept else NEITHER)
            else:
                groups.append([(NotValues(kept),)] if kept else ALWAYS)
        return groups

    def _reference(
        self, at: str, keyword: str, kind: str, apart: bool, positive: bool
    ) -> Alternatives:
        ref = self.document.at(at)[keyword]
        if keyword == "$recursiveRef" and isinstance(ref, str):
            ref = "#"
        if not isinstance(ref, str):
            raise self.invalid(f"{at}/{escape(keyword)}", f"{keyword!r} is a string")
        try:
            target = self.document.resolve(at, keyword, ref)
        except Undecidable as unknown:
            return [(Poison(unknown.refusal),)]
        return self.alternatives(Literal(target, positive), kind, apart=apart)

    def _applied(
        self, at: str, schema: dict[str, Any], kind: str, apart: bool, positive: bool
    ) -> list[Alternatives]:
        """The keywords that apply schemas to the value itself."""
        if _APPLYING.isdisjoint(schema):
            return []
        groups = [
            self._reference(at, keyword, kind, apart, positive)
            for keyword in _REFERENCES
            if keyword in schema
        ]
        if "allOf" in schema:
            members = self._members(at, schema, "allOf")
            groups += [self.alternatives(Literal(p, positive), kind, apart=apart) for p in members]
        if "anyOf" in schema:
            groups.append(self._any_of(self._members(at, schema, "anyOf"), kind, apart, positive))
        if "oneOf" in schema:
            groups.append(self._one_of(self._members(at, schema, "oneOf"), kind, apart, positive))
        if "not" in schema:
            inner = self.alternatives(Literal(f"{at}/not", not positive), kind)
            groups.append(unseen(inner))
        if "if" in schema and ("then" in schema or "else" in schema or apart):
            groups.append(self._conditional(at, schema, kind, apart, positive))
        if kind == "object":
            groups += self._dependent(at, schema, apart, positive)
        return groups

    def _members(self, at: str, schema: dict[str, Any], keyword: str) -> list[str]:
        members = schema[keyword]
        if not isinstance(members, list) or not members:
            raise self.invalid(f"{at}/{keyword}", f"{keyword!r} is a list of schemas")
        return [f"{at}/{keyword}/{i}" for i in range(len(members))]

    def _any_of(self, members: list[str], kind: str, apart: bool, positive: bool) -> Alternatives:
        limit = self.limits.max_alternatives
        if not positive:
            return self._joint([self._no(p, kind) for p in members], kind)
        if not apart:
            return union([self.alternatives(Literal(p, True), kind) for p in members], limit)
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
                found.append(self._alive(self._joint(groups, kind), kind))
        return union(found, limit)

    def _yes(self, pointer: str, kind: str, apart: bool) -> Alternatives:
        return self.alternatives(Literal(pointer, True), kind, apart=apart)

    def _no(self, pointer: str, kind: str) -> Alternatives:
        return self.alternatives(Literal(pointer, False), kind)

    def _joint(self, groups: list[Alternatives], kind: str) -> Alternatives:
        self.spend(sum(map(len, groups)))
        groups = [group for group in groups if group != ALWAYS]
        if len(groups) == 1 and len(groups[0]) <= 1:
            return groups[0]
        return conjunction(
            groups, self.limits.max_alternatives, lambda found: self._alive(found, kind)
        )

    def _alive(self, found: Alternatives, kind: str) -> Alternatives:
        self.spend(len(found))
        if len(found) > 1 and not self.document.has_unevaluated:
            found = absorbed(found)
        return [branch for branch in found if not self.merger.is_dead(branch, kind)]

    def _told(self, found: Alternatives, kind: str) -> Alternatives:
        """The same; where some can be described, those whose denial cannot are left out of it."""
        refusals = [self._denials(branch, kind) for branch in found]
        if all(refusals) or not any(refusals):
            return found
        return [
            joined(branch, (Untold(refusal),)) if refusal else branch
            for branch, refusal in zip(found, refusals, strict=True)
        ]

    def _denials(self, branch: Branch, kind: str) -> Refusal | None:
        """Why a branch cannot be described, where only denials are the reason."""
        shapes = self.merger.shapes(branch, kind)
        refusals = [shape.refusal for shape in shapes if isinstance(shape, Refused)]
        if not all(refusal.denial for refusal in refusals):
            return None
        return refusals[0] if refusals else None

    def _one_of(self, members: list[str], kind: str, apart: bool, positive: bool) -> Alternatives:
        limit = self.limits.max_alternatives
        live = [p for p in members if self._alive(self._yes(p, kind, apart), kind)]
        if not positive:
            none = self._joint([self._no(p, kind) for p in live], kind)
            pairs = [
                self._joint([self._yes(p, kind, apart), self._yes(q, kind, apart)], kind)
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
        if math.prod(map(len, groups)) <= _MAX_ALONE or self.document.has_unevaluated:
            return self._told(self._alive(self._joint(groups, kind), kind), kind)
        found = yes
        for group in groups[1:]:
            self.spend(len(found) * len(group) // 8)
            found = self._shortest(at, conjunction([found, group], 1 << 16), kind)
        return self._told(found, kind)

    def _shortest(self, at: str, found: Alternatives, kind: str) -> Alternatives:
        """The branches that say least, up to a number."""
        kept: Alternatives = []
        for branch in absorbed(found):
            if self.merger.is_dead(branch, kind):
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
            pairs = itertools.product(self.alternatives(one, kind), self.alternatives(other, kind))
            self.spend(len(self.alternatives(one, kind)) * len(self.alternatives(other, kind)))
            self._disjoint[key] = all(
                self.merger.is_dead(branch, kind)
                for left, right in pairs
                for branch in conjunction([[left], [right]], 1)
            )
        return self._disjoint[key]

    def _conditional(
        self, at: str, schema: dict[str, Any], kind: str, apart: bool, positive: bool
    ) -> Alternatives:
        limit = self.limits.max_alternatives
        yes = self._yes(f"{at}/if", kind, apart)
        no = self._no(f"{at}/if", kind)

        def outcome(keyword: str) -> Alternatives:
            if keyword not in schema:
                return ALWAYS if positive else NEITHER
            return self.alternatives(Literal(f"{at}/{keyword}", positive), kind, apart=apart)

        parts = [([yes, outcome("then")]), ([no, outcome("else")])]
        found = [self._alive(self._joint(groups, kind), kind) for groups in parts]
        return union([self._told(each, kind) for each in found] if positive else found, limit)

    def _dependent(
        self, at: str, schema: dict[str, Any], apart: bool, positive: bool
    ) -> list[Alternatives]:
        groups = []
        for keyword in ("dependentSchemas", "dependencies"):
            members = schema.get(keyword, {})
            if not isinstance(members, dict):
                raise self.invalid(f"{at}/{keyword}", f"{keyword!r} maps keys to schemas")
            for name, inner in members.items():
                if isinstance(inner, list | str):
                    continue
                pointer = f"{at}/{keyword}/{escape(name)}"
                then = self.alternatives(Literal(pointer, positive), "object", apart=apart)
                there: Alternatives = [(Required(name),)]
                met = self._joint([there, then], "object")
                absent: Alternatives = [(Property(name, NEVER, seen=False),)]
                groups.append([*absent, *met] if positive else met)
        return groups
