"""A schema read into alternatives of atoms, for one JSON type at a time, affirmed or denied."""

from __future__ import annotations

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
from plait.structured.schema.combining import Combiner
from plait.structured.schema.document import Document
from plait.structured.schema.kinds import Kinds
from plait.structured.schema.limits import Limits, escape
from plait.structured.schema.meaning import NARROW, Meaning
from plait.structured.schema.merging import Merger
from plait.structured.schema.refusal import Refusal, Undecidable
from plait.structured.schema.shapes import Refused
from plait.structured.schema.sharing import Sharing
from plait.structured.schema.values import TYPES, identity, type_of


class Reader:
    """Reads one document. Everything is remembered, so that shared parts are read once."""

    def __init__(self, document: Document, limits: Limits, meaning: Meaning = NARROW) -> None:
        self.document = document
        self.meaning = meaning
        self.limits = limits
        self.originals: dict[str, Any] = {}  # values by identity, as the schema writes them
        self.notes: dict[str, None] = {}
        self.kinds = Kinds(document)
        self.merger = Merger(self)
        self._combiner = Combiner(self)
        self._sharing = Sharing(document)
        self._spent = 0
        self._formulas: dict[str, Formula] = {}
        self._known: dict[tuple[Literal, str, bool], Alternatives] = {}
        self._open: set[tuple[Literal, str, bool]] = set()
        self._conjunctions: dict[tuple[Formula, ...], Formula] = {}
        self._of_formulas: dict[tuple[Formula, str], Alternatives] = {}

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
        found = self._formulas.get(pointer)
        if found is None:
            found = self._formulas[pointer] = self._formula(pointer)
        return found

    def _formula(self, pointer: str) -> Formula:
        schema = self.document.at(pointer)
        if schema is True or schema == {}:
            return TRUE
        if schema is False:
            return NEVER
        if not isinstance(schema, dict):
            raise self.invalid(pointer, "a schema is an object, true or false")
        return frozenset({Literal(self._sharing.place(pointer), True)})

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

    def _branches(self, formula: Formula, kind: str) -> Alternatives:
        if len(formula) == 1:
            (literal,) = formula
            found = self.alternatives(literal, kind)
            return found if len(found) <= 1 else self.joint([found], kind)
        ordered = sorted(formula, key=lambda each: (not each.positive, len(each.pointer), each))
        try:
            groups = [self.alternatives(literal, kind) for literal in ordered]
            return self.joint(groups, kind)
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
        if literal.positive and kind not in self.kinds.of(literal.pointer):
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
        if isinstance(schema, dict) and self.document.is_reference(schema):
            return self.reference(at, "$ref", kind, apart=apart, positive=True)
        inner = unevaluated.keyword_of(schema, kind)
        groups = self._groups(at, kind, apart or inner is not None, positive=True)
        found = self.joint(groups, kind)
        if "not" in schema:
            found = self.told(found, kind)
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
            rest = self.joint(self._groups(at, kind, True, positive=True), kind)
            groups.append(unevaluated.denied(self, at, inner, rest))
        return optional(unseen(union(groups, self.limits.max_alternatives)))

    def _groups(self, at: str, kind: str, apart: bool, *, positive: bool) -> list[Alternatives]:
        """One group of alternatives for each keyword; to be joined, or united where denied."""
        schema = self.document.at(at)
        if not isinstance(schema, dict):
            raise self.invalid(at, "a schema is an object, true or false")
        if self.document.legacy and "$ref" in schema:
            return [self.reference(at, "$ref", kind, apart=apart, positive=positive)]
        typed = self._type(at, schema, kind, positive)
        if positive and typed == NEITHER:
            return [NEITHER]
        if not positive and typed == ALWAYS:
            return [ALWAYS]
        groups = [typed, *self._listed(at, schema, kind, positive)]
        groups += keywords.groups(self, at, schema, kind, positive)
        groups += self._combiner.groups(at, schema, kind, apart, positive)
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

    def reference(
        self, at: str, keyword: str, kind: str, *, apart: bool, positive: bool
    ) -> Alternatives:
        """What the schema says to which a keyword at a place refers."""
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

    def joint(self, groups: list[Alternatives], kind: str) -> Alternatives:
        """The branches that fulfil one branch of each group, but for the dead."""
        self.spend(sum(map(len, groups)))
        groups = [group for group in groups if group != ALWAYS]
        if len(groups) == 1 and len(groups[0]) <= 1:
            return groups[0]
        return conjunction(
            groups, self.limits.max_alternatives, lambda found: self.alive(found, kind)
        )

    def alive(self, found: Alternatives, kind: str) -> Alternatives:
        """Those of which values may be."""
        self.spend(len(found))
        if len(found) > 1 and not self.document.has_unevaluated:
            found = absorbed(found)
        return [branch for branch in found if not self.merger.is_dead(branch, kind)]

    def told(self, found: Alternatives, kind: str) -> Alternatives:
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
