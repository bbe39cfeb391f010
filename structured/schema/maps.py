"""Branches of objects merged into shapes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

from plait.structured.schema import automata
from plait.structured.schema.atoms import (
    NEVER,
    TRUE,
    Additional,
    Atom,
    Branch,
    Exists,
    Formula,
    KeyPattern,
    Names,
    NotValues,
    Poison,
    Property,
    Required,
    Size,
    Untold,
)
from plait.structured.schema.branches import joined
from plait.structured.schema.derive import disjoint, matches
from plait.structured.schema.holding import is_left
from plait.structured.schema.refusal import Refusal, Undecidable
from plait.structured.schema.regex import ANY_CHAR, NOTHING, Node, alt, repeat
from plait.structured.schema.shapes import Listed, Narrowed, Object, Refused, Shape, String

if TYPE_CHECKING:
    from plait.structured.schema.reading import Reader

_MAX_CHOICES = 64
_WIDE = (KeyPattern, Additional)


def shapes(reader: Reader, branch: Branch) -> list[Shape]:
    """The shapes of a branch of objects."""
    known = reader.merger.of_objects
    found = known.get(branch)
    if found is None:
        found = known[branch] = _shapes(reader, branch)
    return found


def _shapes(reader: Reader, branch: Branch) -> list[Shape]:
    present = set(map(type, branch))
    if NotValues in present:
        excluded = [text for a in branch if isinstance(a, NotValues) for text in a.values]
        if any(text != "{}" for text in excluded):
            why = "objects other than {} cannot be excluded"
            return [Refused(Refusal("", "not", why, "list what is allowed", denial=True))]
        if excluded:
            kept = tuple(a for a in branch if not isinstance(a, NotValues))
            branch = joined(kept, (Size(1, None),))
    if Exists in present:
        exists = next(a for a in branch if isinstance(a, Exists))
        return _with_some(reader, branch, exists)
    try:
        merged = _merged(reader, branch)
    except Undecidable as unknown:
        return [Refused(unknown.refusal)]
    return [] if merged is None else _sized(merged, branch)


_SILENT = (Poison, Untold)


def is_dead(reader: Reader, branch: Branch) -> bool | None:
    """Whether `shapes` of a branch are none, where that is told by the required keys alone."""
    own: dict[str, list[Formula]] = {}
    wide: list[Additional] = []
    required = []
    for atom in branch:
        if isinstance(atom, Property):
            own.setdefault(atom.name, []).append(atom.formula)
        elif isinstance(atom, Required):
            required.append(atom.name)
        elif isinstance(atom, Additional) and not atom.patterns:
            wide.append(atom)
        elif not isinstance(atom, _SILENT):
            return None
    return any(
        reader.is_empty(
            reader.both(*own.get(name, ()), *(a.formula for a in wide if name not in a.names))
        )
        for name in required
    )


def _with_some(reader: Reader, branch: Branch, atom: Exists) -> list[Shape]:
    """One branch for each key that may be the one."""
    rest = tuple(each for each in branch if each != atom)
    frames = shapes(reader, tuple(each for each in rest if not isinstance(each, Exists | Size)))
    found: list[Shape] = []
    for frame in frames:
        if isinstance(frame, Refused):
            return [frame]
        assert isinstance(frame, Object), "without values, objects only"
        for name, _ in frame.names:
            if is_left(name, atom) and (atom.named == TRUE or reader.holds(atom.named, name)):
                more = (Required(name), Property(name, atom.formula, seen=False))
                found += shapes(reader, joined(rest, more))
        free = [formula for node, formula in frame.patterns if not _apart(node, atom)]
        free.append(frame.rest)
        if not all(reader.is_empty(reader.both(f, atom.formula)) for f in free):
            found += _all_free(reader, rest, atom)
            found.append(Narrowed(atom.refusal) if found else Refused(atom.refusal))
    return list(dict.fromkeys(found))


def _all_free(reader: Reader, branch: Branch, atom: Exists) -> list[Shape]:
    """Some of the objects: with free keys only, beside those required, and all of them so."""
    if atom.named != TRUE or any(isinstance(each, Size | Exists) for each in branch):
        return []
    every: Atom
    if atom.inside is None:
        every = Additional(atom.names, atom.patterns, atom.formula, seen=False)
    else:
        every = KeyPattern(atom.inside, atom.formula, seen=False)
    merged = _merged(reader, joined(branch, (every,)))
    if merged is None:
        return []
    patterns = [(n, NEVER if _apart(n, atom) else formula) for n, formula in merged.patterns]
    rest = merged.rest if atom.inside is None else NEVER
    if rest == NEVER and all(reader.is_empty(formula) for _, formula in patterns):
        return []
    absent = [name for name, _ in merged.names if name not in merged.required]
    kept = dataclasses.replace(merged, patterns=tuple(patterns), rest=rest)
    return [_fixed(kept, (), absent, low=len(merged.required) + 1)]


def _apart(node: Node, atom: Exists) -> bool:
    """Whether the keys of a language are surely not those that are asked for."""
    return node in atom.patterns or (atom.inside is not None and disjoint(node, atom.inside))


@dataclasses.dataclass(slots=True)
class _Parts:
    """The atoms of a branch, by what they speak of."""

    own: dict[str, list[Formula]]  # of each named key
    required: dict[str, None]
    named: list[Names]
    wide: list[KeyPattern | Additional]

    @classmethod
    def of(cls, branch: Branch) -> _Parts:
        parts = cls({}, {}, [], [])
        for atom in branch:
            if isinstance(atom, Property):
                parts.own.setdefault(atom.name, []).append(atom.formula)
            elif isinstance(atom, Required):
                parts.required[atom.name] = None
            elif isinstance(atom, Names):
                parts.named.append(atom)
            elif isinstance(atom, _WIDE):
                parts.wide.append(atom)
        return parts


def _merged(reader: Reader, branch: Branch) -> Object | None:
    parts = _Parts.of(branch)
    own, required, named, wide = parts.own, parts.required, parts.named, parts.wide
    apart = [a for a in wide if isinstance(a, Additional)]
    names = dict.fromkeys((*own, *required, *(n for a in apart for n in sorted(a.names))))
    listed, allowed = _allowed_keys(reader, named)
    if listed is not None:
        names |= dict.fromkeys(listed)
    reader.spend((len(names) + len(branch)) // 2)
    named_apart = [a for a in apart if not a.patterns]
    if named or len(named_apart) < len(wide):
        formulas = {n: _of_name(reader, own.get(n, []), wide, n, named) for n in names}
    else:
        both, none = reader.both, ()
        formulas = {
            n: both(*own.get(n, none), *[a.formula for a in named_apart if n not in a.names])
            for n in names
        }
    rest = reader.both(*(a.formula for a in apart))
    of_patterns = {node: _of_cell(reader, wide, m) for node, m in _cells(wide).items()}
    if listed is not None:
        rest, of_patterns = NEVER, {}
    elif allowed is not None:
        of_patterns, rest = _within(of_patterns, rest, allowed, named[0].at), NEVER
    is_empty = reader.merger.is_empty
    if any(is_empty(formulas[name]) for name in required):
        return None
    rest = NEVER if reader.is_empty(rest) else rest
    of_patterns = {n: f for n, f in of_patterns.items() if f != rest}
    kept = []
    for name, formula in formulas.items():
        empty = name not in required and is_empty(formula)
        left_out = empty and rest == NEVER and not any(matches(n, name) for n in of_patterns)
        if not left_out:
            kept.append((name, NEVER if empty else formula))
    return Object(
        names=tuple(kept),
        required=frozenset(required),
        patterns=tuple(of_patterns.items()),
        rest=rest,
    )


def _all_patterns(atom: KeyPattern | Additional) -> list[Node]:
    return [atom.node] if isinstance(atom, KeyPattern) else sorted(atom.patterns, key=repr)


def _of_name(
    reader: Reader,
    own: list[Formula],
    wide: list[KeyPattern | Additional],
    name: str,
    named: list[Names],
) -> Formula:
    if named and not all(reader.holds(atom.formula, name) for atom in named):
        return NEVER
    if not wide:
        return own[0] if len(own) == 1 else reader.both(*own)
    return reader.both(*own, *(atom.formula for atom in wide if _is_meant(atom, name)))


def _is_meant(atom: KeyPattern | Additional, name: str) -> bool:
    return matches(atom.node, name) if isinstance(atom, KeyPattern) else is_left(name, atom)


def _cells(wide: list[KeyPattern | Additional]) -> dict[Node, frozenset[Node]]:
    """Languages of which no two share a key, each with the patterns that its keys match."""
    cells: dict[Node, frozenset[Node]] = {}
    for node in dict.fromkeys(n for a in wide for n in _all_patterns(a)):
        alone = node
        for cell in [each for each in cells if not disjoint(each, node)]:
            matched = cells.pop(cell)
            cells[_cut(wide, cell, node, inside=True)] = matched | {node}
            cells[_cut(wide, cell, node, inside=False)] = matched
            alone = _cut(wide, alone, cell, inside=False)
        cells[alone] = frozenset({node})
        cells.pop(NOTHING, None)
    return cells


def _of_cell(
    reader: Reader, wide: list[KeyPattern | Additional], matched: frozenset[Node]
) -> Formula:
    found = reader.both(
        *(
            atom.formula
            for atom in wide
            if (isinstance(atom, KeyPattern) and atom.node in matched)
            or (isinstance(atom, Additional) and not atom.patterns & matched)
        )
    )
    return NEVER if reader.is_empty(found) else found


def _cut(wide: list[KeyPattern | Additional], node: Node, other: Node, *, inside: bool) -> Node:
    kept = other if inside else automata.complement(other)
    joint = automata.intersection((node, kept)) if kept is not None else None
    if joint is None:
        raise _overlap(wide)
    return joint


def _overlap(wide: list[KeyPattern | Additional]) -> Undecidable:
    at = next((a.at for a in wide if isinstance(a, KeyPattern)), "")
    why = "two patterns may match the same key"
    instead = "write patterns of which each key matches one at most"
    return Undecidable(Refusal(at, "patternProperties", why, instead))


def _allowed_keys(reader: Reader, named: list[Names]) -> tuple[list[str] | None, Node | None]:
    """What keys may be: a list of them, or a language, or neither where all may be."""
    if not named:
        return None, None
    formula = reader.both(*(atom.formula for atom in named))
    found = [
        shape
        for branch in reader.branches(formula, "string")
        for shape in reader.merger.shapes(branch, "string")
    ]
    if all(isinstance(shape, Listed) for shape in found):
        import json

        return [json.loads(t) for s in found if isinstance(s, Listed) for t in s.values], None
    nodes = [_language(shape, named[0].at) for shape in found]
    return None, alt(nodes)


def _language(shape: Shape, at: str) -> Node:
    if isinstance(shape, Refused):
        raise Undecidable(shape.refusal)
    nodes: list[Node] = []
    if isinstance(shape, String):
        nodes = list(shape.patterns)
        if shape.low or shape.high is not None:
            nodes.append(repeat(ANY_CHAR, shape.low, shape.high))
        nodes = nodes or [repeat(ANY_CHAR, 0, None)]
    elif isinstance(shape, Listed):
        import json

        from plait.structured.schema.regex import Chars, seq

        nodes = [alt([seq([Chars(((ord(c),) * 2,)) for c in json.loads(t)]) for t in shape.values])]
    joint = automata.intersection(tuple(nodes)) if nodes else None
    if joint is None:
        why = "what it allows cannot be written as one pattern"
        raise Undecidable(Refusal(at, "propertyNames", why, "use one 'pattern', or 'enum'"))
    return joint


def _within(
    patterns: dict[Node, Formula], rest: Formula, allowed: Node, at: str
) -> dict[Node, Formula]:
    """Patterns and the rest, cut down to the keys that are allowed."""
    parts = {_joint([node, allowed], at): formula for node, formula in patterns.items()}
    if rest != NEVER:
        others = [automata.complement(node) for node in patterns]
        parts[_joint([allowed, *others], at)] = rest
    return parts


def _joint(nodes: list[Node | None], at: str) -> Node:
    known = tuple(node for node in nodes if node is not None)
    joint = automata.intersection(known) if len(known) == len(nodes) else None
    if joint is None:
        why = "together with 'patternProperties' it cannot be written as one pattern"
        raise Undecidable(Refusal(at, "propertyNames", why, "say it by 'patternProperties' alone"))
    return joint


def _sized(shape: Object, branch: Branch) -> list[Shape]:
    """The shape under bounds on the number of keys."""
    sizes = [a for a in branch if isinstance(a, Size)]
    if not sizes:
        return [shape]
    low = max((a.low for a in sizes), default=0)
    highs = [a.high for a in sizes if a.high is not None]
    high = min(highs, default=None)
    at = next((a.at for a in sizes if a.low == low or a.high == high), "")
    optional = [n for n, f in shape.names if n not in shape.required and f != NEVER]
    closed = shape.rest == NEVER and all(f == NEVER for _, f in shape.patterns)
    most = len(shape.required) + len(optional) if closed else math.inf
    low = 0 if low <= len(shape.required) else low
    if (high is not None and len(shape.required) > high) or low > most:
        return []
    high = None if high is None or high >= most else high
    if not low and high is None:
        return [shape]
    if high is None and closed:
        need = low - len(shape.required)
        chosen = list(itertools.islice(itertools.combinations(optional, need), 1000))
        if len(chosen) <= _MAX_CHOICES:
            return [_fixed(shape, each, ()) for each in chosen]
    if high is None and low == len(shape.required) + 1 and len(optional) <= _MAX_CHOICES:
        # One key more than the required: one of the optional ones, or a free one.
        some: list[Shape] = [_fixed(shape, (name,), ()) for name in optional]
        return [*some, _fixed(shape, (), optional, low=low)]
    return _chosen(shape, optional, closed, (low, high), at)


def _chosen(
    shape: Object, optional: list[str], closed: bool, bounds: tuple[int, int | None], at: str
) -> list[Shape]:
    """One shape for each choice of optional keys, which leaves a bound on the free keys alone."""
    low, high = bounds
    top = len(optional) if high is None else min(len(optional), high - len(shape.required))
    keyword = "minProperties" if low else "maxProperties"
    if sum(math.comb(len(optional), size) for size in range(top + 1)) > _MAX_CHOICES:
        why = "there are too many ways to choose among the optional keys"
        return [Refused(Refusal(at, keyword, why, "require the keys that must be there"))]
    found: list[Shape] = []
    for size in range(top + 1):
        for each in itertools.combinations(optional, size):
            count = len(shape.required) + size
            others = [name for name in optional if name not in each]
            if closed and count >= low:
                found.append(_fixed(shape, each, others))
            elif not closed and low > count + 1:
                # The same free key may come twice, and would count twice.
                why = "free keys cannot be counted: one may come twice"
                return [Refused(Refusal(at, keyword, why, "name the keys and require them"))]
            elif not closed:
                least = low if low > count else 0
                found.append(_fixed(shape, each, others, low=least, high=high))
    return found


def _fixed(
    shape: Object,
    required: tuple[str, ...],
    absent: tuple[str, ...] | list[str],
    *,
    low: int = 0,
    high: int | None = None,
) -> Object:
    closed = shape.rest == NEVER and not shape.patterns
    names = tuple(
        (name, NEVER if name in absent else formula)
        for name, formula in shape.names
        if not (closed and name in absent)
    )
    return Object(
        names=names,
        required=shape.required | set(required),
        patterns=shape.patterns,
        rest=shape.rest,
        low=low,
        high=high,
    )
