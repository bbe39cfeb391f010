r"""Anchors, word borders and lookaround taken out of a pattern: what is left is a language.

Each stands between what comes before it and what comes behind, and narrows one of them or both:
`a\b` is every beginning that ends like a word, followed by what begins unlike one, and so on.
"""

from __future__ import annotations

import itertools

from plait.structured.schema.regex import (
    ANY,
    EMPTY,
    NOTHING,
    WORD,
    Alt,
    Border,
    Chars,
    Edge,
    Look,
    Node,
    Ranges,
    RegexError,
    Repeat,
    Seq,
    alt,
    common,
    complement,
    repeat,
    seq,
)

_MAX_SPREAD = 256  # sequences into which the options of a pattern may fall apart
_OTHER = complement(WORD)

Parts = list[Node]


def whole(node: Node, *, before: Node, after: Node) -> Node:
    """The language of whole strings in which `node` stands between two others."""
    if not has_edge(node):
        return seq([before, node, after])
    return _without_edges(seq([before, node, after]), _MAX_SPREAD)


def has_edge(node: Node) -> bool:
    """Whether something in a pattern looks at what stands around it."""
    if isinstance(node, Seq):
        return any(map(has_edge, node.parts))
    if isinstance(node, Alt):
        return any(map(has_edge, node.options))
    if isinstance(node, Repeat):
        return has_edge(node.node)
    return isinstance(node, Edge | Border | Look)


def is_tempered(node: Node) -> bool:
    """Whether this is one character at which something does not begin (`(?!end).`)."""
    match node:
        case Seq((Look(inner, True, False), Chars())):
            return not has_edge(inner)
    return False


def _without_edges(node: Node, most: int) -> Node:
    found = _spread(node, most)
    return alt([_resolved(parts, most // len(found)) for parts in found])


def _spread(node: Node, most: int) -> list[Parts]:
    """Sequences in which all that looks around stands beside the rest, not inside of it."""
    if isinstance(node, Alt) and has_edge(node):
        found = [parts for option in node.options for parts in _spread(option, most)]
    elif isinstance(node, Seq) and has_edge(node):
        each = [_spread(part, most) for part in node.parts]
        if _product(map(len, each)) > most:
            raise RegexError("too many options with anchors or lookaround", 0)
        found = [list(itertools.chain(*chosen)) for chosen in itertools.product(*each)]
    else:
        found = [[node]]
    if len(found) > most:
        raise RegexError("too many options with anchors or lookaround", 0)
    return found


def _product(sizes: map[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _resolved(parts: Parts, most: int) -> Node:
    at = next((i for i, part in enumerate(parts) if isinstance(part, Edge | Border)), None)
    if at is None:
        return _looked(parts)
    edge, left, right = parts[at], parts[:at], parts[at + 1 :]
    if isinstance(edge, Edge):
        sides = [_empty(seq(left)), *right] if edge.start else [*left, _empty(seq(right))]
        return _without_edges(seq(sides), most)
    assert isinstance(edge, Border)
    inside, outside = _ending(seq(left), WORD), _ending(seq(left), _OTHER, empty=True)
    word, other = _starting(seq(right), WORD), _starting(seq(right), _OTHER, empty=True)
    if not edge.wanted:
        word, other = other, word
    options = [seq([inside, other]), seq([outside, word])]
    if most < 1:
        raise RegexError("too many options with anchors or lookaround", 0)
    return alt([_without_edges(option, most) for option in options])


# --- what of a language is empty, or begins or ends with some character ---


def _empty(node: Node) -> Node:
    """What is left of a language if it takes no character."""
    if isinstance(node, Seq):
        return seq([_empty(part) for part in node.parts])
    if isinstance(node, Alt):
        return alt([_empty(option) for option in node.options])
    if isinstance(node, Repeat):
        return EMPTY if node.low == 0 else _empty(node.node)
    return NOTHING if isinstance(node, Chars) else node


def _starting(node: Node, ranges: Ranges, *, empty: bool = False) -> Node:
    """The strings that begin with one of some characters; with the empty one if asked for."""
    options: list[Node] = [_empty(node)] if empty else []
    if isinstance(node, Chars):
        options.append(Chars(common(node.ranges, ranges)))
    elif isinstance(node, Alt):
        options += [_starting(option, ranges) for option in node.options]
    elif isinstance(node, Repeat):
        options.append(seq([_starting(node.node, ranges), _once_less(node)]))
    elif isinstance(node, Seq):
        for i, part in enumerate(node.parts):
            skipped = [_empty(each) for each in node.parts[:i]]
            options.append(seq([*skipped, _starting(part, ranges), *node.parts[i + 1 :]]))
    return alt(options)


def _ending(node: Node, ranges: Ranges, *, empty: bool = False) -> Node:
    """The strings that end with one of some characters; with the empty one if asked for."""
    options: list[Node] = [_empty(node)] if empty else []
    if isinstance(node, Chars):
        options.append(Chars(common(node.ranges, ranges)))
    elif isinstance(node, Alt):
        options += [_ending(option, ranges) for option in node.options]
    elif isinstance(node, Repeat):
        options.append(seq([_once_less(node), _ending(node.node, ranges)]))
    elif isinstance(node, Seq):
        for i, part in enumerate(node.parts):
            skipped = [_empty(each) for each in node.parts[i + 1 :]]
            options.append(seq([*node.parts[:i], _ending(part, ranges), *skipped]))
    return alt(options)


def _once_less(node: Repeat) -> Node:
    """What remains of a repetition beside one that takes characters; others may take none."""
    low = max(0, node.low - 1) if _empty(node.node) == NOTHING else 0
    return repeat(node.node, low, None if node.high is None else node.high - 1)


# --- lookaround ---


def _looked(parts: Parts) -> Node:
    looks = [i for i, part in enumerate(parts) if has_edge(part)]
    while looks:
        last, first = parts[looks[-1]], parts[looks[0]]
        if isinstance(last, Look) and last.ahead:
            at = looks.pop()
            rest = _ahead(last, seq(parts[at + 1 :]), alone=not parts[:at])
            parts = [*parts[:at], rest]
        elif isinstance(last, Repeat) and looks[-1] == len(parts) - 1:
            parts = [*parts[:-1], _tempered(last)]
            looks.pop()
        elif isinstance(first, Look) and not first.ahead:
            at = looks.pop(0)
            parts = [_behind(first, seq(parts[:at])), *parts[at + 1 :]]
            looks = [i - at for i in looks]
        else:
            raise RegexError("lookaround in a place where it cannot be told,", 0)
    return seq(parts)


def _ahead(look: Look, rest: Node, *, alone: bool) -> Node:
    if isinstance(look.node, Chars):
        ranges = look.node.ranges if look.wanted else complement(look.node.ranges)
        return _starting(rest, ranges, empty=not look.wanted)
    if has_edge(look.node) and not alone:
        _check_inside(look.node, Edge(False))
    return _kept(rest, whole(look.node, before=EMPTY, after=ANY), wanted=look.wanted)


def _behind(look: Look, before: Node) -> Node:
    if isinstance(look.node, Chars):
        ranges = look.node.ranges if look.wanted else complement(look.node.ranges)
        return _ending(before, ranges, empty=not look.wanted)
    _check_inside(look.node, Edge(True))
    return _kept(before, whole(look.node, before=ANY, after=EMPTY), wanted=look.wanted)


def _check_inside(node: Node, allowed: Edge) -> None:
    """What is looked at may look no further than to the end of the string that it faces."""
    for parts in _spread(node, _MAX_SPREAD):
        if any(has_edge(part) and part != allowed for part in parts):
            raise RegexError("lookaround inside of lookaround, which is not enforced,", 0)


def _tempered(node: Repeat) -> Node:
    """Characters at none of which something begins, up to the end of the string."""
    match node.node:
        case Seq((Look(inner, _, _), Chars() as char)):
            banned = seq([ANY, inner, ANY])
            if _empty(inner) != NOTHING:
                return EMPTY if node.low == 0 else NOTHING
            return _kept(repeat(char, node.low, node.high), banned, wanted=False)
    raise AssertionError("the reader lets no others through")


def _kept(node: Node, other: Node, *, wanted: bool) -> Node:
    """The strings of a language that are, or are not, of another."""
    from plait.structured.schema import automata

    kept = other if wanted else automata.complement(other)
    joint = automata.intersection((node, kept)) if kept is not None else None
    if joint is None:
        raise RegexError("lookaround that takes too many words without", 0)
    return joint
