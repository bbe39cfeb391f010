"""The keywords that assert something of one type: what each says, affirmed and denied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from plait.structured.schema import formats, regex
from plait.structured.schema.atoms import (
    NEVER,
    TRUE,
    Additional,
    Alternatives,
    Bound,
    Contains,
    Count,
    Exists,
    Items,
    KeyPattern,
    Length,
    MultipleOf,
    Names,
    Pattern,
    Poison,
    Prefix,
    Property,
    Required,
    Size,
    Unique,
)
from plait.structured.schema.branches import ALWAYS, NEITHER
from plait.structured.schema.limits import escape
from plait.structured.schema.refusal import Refusal
from plait.structured.schema.values import exact

if TYPE_CHECKING:
    from plait.structured.schema.reading import Reader

FORMATS_ASSERT_NOTHING = (
    "'format' asserts nothing in the draft that '$schema' names; leave '$schema' out, or set "
    "structured_outputs.assert_formats, where formats should be held"
)

Schema = dict[str, Any]
Reading = Callable[["Reader", str, Schema, bool], Iterator[Alternatives]]
_REPHRASE = (
    "if 'oneOf' asks for its opposite, say 'anyOf', or give each member a required property with "
    "a 'const' of its own; else say what is allowed, not what is forbidden"
)


def groups(
    reader: Reader, at: str, schema: Schema, kind: str, positive: bool
) -> list[Alternatives]:
    """What the keywords for this type say, each on its own."""
    found: list[Alternatives] = []
    for names, read in _BY_TYPE[kind]:
        if not names.isdisjoint(schema):
            found += read(reader, at, schema, positive)
    return found


def _poison(at: str, keyword: str, why: str, instead: str) -> Alternatives:
    return [(Poison(Refusal(f"{at}/{escape(keyword)}", keyword, why, instead)),)]


def _undeniable(at: str, keyword: str, why: str) -> Alternatives:
    refusal = Refusal(f"{at}/{escape(keyword)}", keyword, why, _REPHRASE, denial=True)
    return [(Poison(refusal),)]


# --- numbers ---

_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")  # of draft 4 they are true or false


def _number(reader: Reader, at: str, schema: Schema, keyword: str) -> Fraction | None:
    value = schema.get(keyword)
    if value is None or (isinstance(value, bool) and keyword in _EXCLUSIVE):
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise reader.invalid(f"{at}/{keyword}", f"{keyword!r} is a number")
    return exact(value)


def _bounds(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    for name, upper in (("minimum", False), ("maximum", True)):
        strict_name = f"exclusiveM{name[1:]}"
        strict = schema.get(strict_name) is True  # draft 4
        if strict and schema.get(name) is None:
            raise reader.invalid(
                f"{at}/{strict_name}", f"{strict_name!r} is a number, or true beside {name!r}"
            )
        for keyword, exclusive in ((name, strict), (strict_name, True)):
            value = _number(reader, at, schema, keyword)
            if value is None:
                continue
            if positive:
                yield [(Bound(value, upper, exclusive),)]
            else:
                yield [(Bound(value, not upper, not exclusive),)]


def _multiple(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    for keyword in ("multipleOf", "divisibleBy"):
        if (keyword == "divisibleBy") > reader.document.legacy:
            continue
        value = _number(reader, at, schema, keyword)
        if value is None:
            continue
        if value <= 0:
            raise reader.invalid(f"{at}/{keyword}", f"{keyword!r} is above 0")
        if positive:
            yield [(MultipleOf(value, f"{at}/{keyword}"),)]
        else:
            yield _undeniable(at, keyword, "its denial cannot be written")


# --- strings ---


def _whole(reader: Reader, at: str, schema: Schema, keyword: str) -> int | None:
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise reader.invalid(f"{at}/{keyword}", f"{keyword!r} is a whole number, 0 or more")
    return value


def _endless(reader: Reader, at: str, keyword: str, count: int) -> Alternatives | None:
    """The refusal of a lower bound that no answer reaches before it is cut."""
    most = reader.limits.max_count
    if count <= most:
        return None
    why = f"no answer has room for {count:.12g}; {most:,} are the limit"
    return _poison(at, keyword, why, "ask for fewer")


_UNREACHED = 2**31  # of anything in one answer; more is beyond what the libraries count to


def _span(names: tuple[str, str], make: Callable[[str, int, int | None], Any]) -> Reading:
    """A pair of keywords that bound a count."""

    def at_most(at: str, count: int) -> Alternatives:
        return ALWAYS if count > _UNREACHED else [(make(at, 0, count),)]

    def at_least(reader: Reader, at: str, keyword: str, count: int) -> Alternatives:
        made: Alternatives = [(make(f"{at}/{keyword}", count, None),)]
        return _endless(reader, at, keyword, count) or made

    def read(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
        low = _whole(reader, at, schema, names[0])
        high = _whole(reader, at, schema, names[1])
        if low is not None and (low or not positive):
            below = at_most(at, low - 1) if low else NEITHER
            yield at_least(reader, at, names[0], low) if positive else below
        if high is not None:
            most = at_most(f"{at}/{names[1]}", high)
            yield most if positive else at_least(reader, at, names[1], high + 1)

    return read


def _pattern(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    if "pattern" not in schema:
        return
    if not isinstance(schema["pattern"], str):
        raise reader.invalid(f"{at}/pattern", "'pattern' is a string")
    yield language(at, "pattern", schema["pattern"], positive)


def language(at: str, keyword: str, pattern: str, positive: bool) -> Alternatives:
    """A string in which a pattern is found, or is not."""
    place = f"{at}/{keyword}"
    try:
        node = regex.search(pattern)
    except regex.RegexError as error:
        return _poison(at, keyword, f"the pattern {pattern!r} has {error}", "write it without")
    if not positive:
        from plait.structured.schema import automata

        others = automata.complement(node)
        if others is None:
            return _undeniable(
                at, keyword, "the strings outside of the pattern are too many to tell"
            )
        node = others
    if regex.is_unwritten(node):
        why = "all strings that it allows have control characters that answers never have"
        return _poison(at, keyword, why, "leave them out")
    return [(Pattern(node, place),)]


def _format(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    if "format" not in schema:
        return
    name = schema["format"]
    if not isinstance(name, str):
        raise reader.invalid(f"{at}/format", "'format' is a string")
    if not reader.meaning.asserts_formats:
        if reader.meaning.by_draft:
            reader.notes[FORMATS_ASSERT_NOTHING] = None
        return
    if form := formats.FORMS.get(name):
        parts = [language(at, "format", pattern, positive) for pattern in form.patterns]
        if form.longest is not None:
            bound = (0, form.longest) if positive else (form.longest + 1, None)
            parts.append([(Length(*bound),)])
        yield from parts if positive else [[branch for part in parts for branch in part]]
    elif name in formats.REFUSED:
        yield _poison(
            at,
            "format",
            f"no backend enforces the format {name!r}",
            "leave it out, or say it by 'pattern'",
        )
    else:
        # Not of the standard, which says that it asserts nothing.
        reader.notes[f"{at}/format: {name!r} is no standard format and asserts nothing"] = None


# --- arrays ---


def _tuple(schema: Schema) -> tuple[str, str]:
    """The keywords of the first items and of the rest: before 2020-12 they had other names."""
    if isinstance(schema.get("items"), list) and "prefixItems" not in schema:
        return "items", "additionalItems"
    return "prefixItems", "items"


def _items(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    first, rest = _tuple(schema)
    members = schema.get(first, [])
    if not isinstance(members, list):
        raise reader.invalid(f"{at}/{first}", f"{first!r} is a list of schemas")
    formulas = [reader.formula(f"{at}/{first}/{i}") for i in range(len(members))]
    if positive and formulas:
        yield [tuple(Prefix(i, formula) for i, formula in enumerate(formulas))]
    if not positive:
        for i, formula in enumerate(formulas):
            if formula != TRUE:
                yield [(Count(i + 1, None), Prefix(i, reader.denied(formula)))]
    if rest in schema:
        formula = reader.formula(f"{at}/{rest}")
        if positive:
            yield [(Items(len(members), formula),)]
        elif formula == NEVER:
            yield [(Count(len(members) + 1, None),)]
        elif formula != TRUE:
            place = f"{at}/{rest}"
            yield [(Contains(reader.denied(formula), 1, None, len(members), place),)]


def _contains(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    if "contains" not in schema:
        return
    low = _whole(reader, at, schema, "minContains")
    high = _whole(reader, at, schema, "maxContains")
    if reader.document.legacy:
        low = high = None
    low = 1 if low is None else low
    formula = reader.formula(f"{at}/contains")
    place, seen = f"{at}/contains", reader.document.contains_evaluates
    if positive:
        endless = _endless(reader, at, "minContains", low)
        yield endless or [(Contains(formula, low, high, 0, place, seen),)]
        return
    if low:
        yield [(Contains(formula, 0, low - 1, 0, place, False),)]
    if high is not None:
        yield [(Contains(formula, high + 1, None, 0, place, False),)]


def _unique(_: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    if schema.get("uniqueItems") is True:
        denied = _undeniable(at, "uniqueItems", "lists with a repetition cannot be described")
        yield [(Unique(f"{at}/uniqueItems"),)] if positive else denied


# --- objects ---


def _map(reader: Reader, at: str, schema: Schema, keyword: str) -> dict[str, Any]:
    members = schema.get(keyword, {})
    if not isinstance(members, dict):
        raise reader.invalid(f"{at}/{keyword}", f"{keyword!r} maps keys to schemas")
    return members


def _properties(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    names = _map(reader, at, schema, "properties")
    formulas = {n: reader.formula(f"{at}/properties/{escape(n)}") for n in names}
    if positive and formulas:
        yield [tuple(Property(name, formula) for name, formula in formulas.items())]
    if not positive:
        for name, formula in formulas.items():
            if formula != TRUE:
                yield [(Required(name), Property(name, reader.denied(formula), seen=False))]


def _patterns(reader: Reader, at: str, schema: Schema) -> dict[str, regex.Node]:
    patterns = {}
    for pattern in _map(reader, at, schema, "patternProperties"):
        try:
            patterns[pattern] = regex.search(pattern)
        except regex.RegexError as error:
            raise keyword_refusal(at, pattern, error) from None
    return patterns


def keyword_refusal(at: str, pattern: str, error: regex.RegexError) -> Exception:
    """A pattern of keys that cannot be read makes all of its object unknown."""
    from plait.structured.schema.refusal import Undecidable

    why = f"the pattern {pattern!r} has {error}"
    place = f"{at}/patternProperties/{escape(pattern)}"
    return Undecidable(Refusal(place, "patternProperties", why, "write it without"))


def _keys(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    from plait.structured.schema.refusal import Undecidable

    try:
        patterns = _patterns(reader, at, schema)
    except Undecidable as unknown:
        yield [(Poison(unknown.refusal),)]
        return
    for pattern, node in patterns.items():
        place = f"{at}/patternProperties/{escape(pattern)}"
        formula = reader.formula(place)
        if positive:
            yield [(KeyPattern(node, formula, at=place),)]
        elif formula != TRUE:
            why = "objects with a wrong value cannot be described"
            refusal = Refusal(place, "patternProperties", why, _REPHRASE, denial=True)
            denied = reader.denied(formula)
            yield [(Exists(frozenset(), frozenset(), denied, refusal, inside=node),)]
    if "additionalProperties" in schema:
        place = f"{at}/additionalProperties"
        formula = reader.formula(place)
        names = frozenset(_map(reader, at, schema, "properties"))
        others = frozenset(patterns.values())
        if positive:
            yield [(Additional(names, others, formula),)]
        elif formula != TRUE:
            why = "objects with a key too many, or with a wrong one, cannot be described"
            refusal = Refusal(place, "additionalProperties", why, _REPHRASE, denial=True)
            yield [(Exists(names, others, reader.denied(formula), refusal),)]


def _required(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    names = schema.get("required", [])
    if isinstance(names, bool):
        names = []  # refused by `faults`
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise reader.invalid(f"{at}/required", "'required' is a list of keys")
    if positive and names:
        yield [tuple(Required(name) for name in dict.fromkeys(names))]
    if not positive:
        for name in names:
            yield [(Property(name, NEVER, seen=False),)]


def _names(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    if "propertyNames" not in schema:
        return
    place = f"{at}/propertyNames"
    formula = reader.formula(place)
    if positive:
        yield [(Names(formula, place),)]
    elif formula != TRUE:
        why = "objects with a wrong key cannot be described"
        refusal = Refusal(place, "propertyNames", why, _REPHRASE, denial=True)
        named = reader.denied(formula)
        yield [(Exists(frozenset(), frozenset(), TRUE, refusal, named=named),)]


def _dependent(reader: Reader, at: str, schema: Schema, positive: bool) -> Iterator[Alternatives]:
    for keyword in ("dependentRequired", "dependencies"):
        for name, given in _map(reader, at, schema, keyword).items():
            needed = [given] if isinstance(given, str) else given
            if not isinstance(needed, list):
                continue
            if positive:
                met = (Required(name), *(Required(str(each)) for each in needed))
                yield [(Property(name, NEVER, seen=False),), tuple(dict.fromkeys(met))]
            else:
                yield [(Required(name), Property(str(each), NEVER, seen=False)) for each in needed]


_size = _span(("minProperties", "maxProperties"), lambda at, low, high: Size(low, high, at))
_count = _span(("minItems", "maxItems"), lambda _, low, high: Count(low, high))
_length = _span(("minLength", "maxLength"), lambda _, low, high: Length(low, high))


def _table(*readings: tuple[str, Reading]) -> tuple[tuple[frozenset[str], Reading], ...]:
    return tuple((frozenset(names.split()), read) for names, read in readings)


# By type: readings, and the keywords without which they have nothing to say.
_BY_TYPE: dict[str, tuple[tuple[frozenset[str], Reading], ...]] = {
    "null": (),
    "boolean": (),
    "number": _table(
        ("minimum maximum exclusiveMinimum exclusiveMaximum", _bounds),
        ("multipleOf divisibleBy", _multiple),
    ),
    "string": _table(
        ("minLength maxLength", _length),
        ("pattern", _pattern),
        ("format", _format),
    ),
    "array": _table(
        ("items prefixItems additionalItems", _items),
        ("minItems maxItems", _count),
        ("contains", _contains),
        ("uniqueItems", _unique),
    ),
    "object": _table(
        ("properties", _properties),
        ("required", _required),
        ("patternProperties additionalProperties", _keys),
        ("propertyNames", _names),
        ("minProperties maxProperties", _size),
        ("dependentRequired dependencies", _dependent),
    ),
}

NAMES = frozenset[str]().union(*(names for table in _BY_TYPE.values() for names, _ in table))
