"""A small vocabulary for grammars, and walks through them."""

from __future__ import annotations

import functools
import json

import numpy as np

from plait.structured import backends
from plait.structured.matcher import Matcher
from plait.structured.spec import GrammarKind
from plait.structured.vocabulary import Vocabulary

END, OTHER_END, SPECIAL, EMPTY = 256, 257, 258, 259
# Some in the middle of others, one of three parts of characters, and one that is there twice.
LONGER = (b'{"', b'"a"', b'":', b"ab", b"abc", b'"}', b"\xc3\xa9", b"\xa9x", "日本".encode(), b"a")
FIRST_LONGER = 260
SIZE = FIRST_LONGER + len(LONGER)
WIDTH = SIZE + 40  # padded

BACKENDS = backends.NAMES


def greedy(text: str) -> list[int]:
    """The longest token each time."""
    rest, tokens = text.encode(), []
    while rest:
        fitting = [i for i, piece in enumerate(LONGER) if rest.startswith(piece)]
        best = max(fitting, key=lambda i: len(LONGER[i]), default=None)
        if best is None or len(LONGER[best]) == 1:
            tokens.append(rest[0])
            rest = rest[1:]
        else:
            tokens.append(FIRST_LONGER + best)
            rest = rest[len(LONGER[best]) :]
    return tokens


@functools.cache
def vocabulary() -> Vocabulary:
    """All bytes, two end tokens, a special one, an empty one, longer ones, padding."""
    special = (b"<|end|>", b"<|other|>", b"<|special|>", b"")
    return Vocabulary(
        pieces=(*(bytes([i]) for i in range(256)), *special, *LONGER),
        special_ids=frozenset({END, OTHER_END, SPECIAL}),
        end_ids=(END, OTHER_END),
        width=WIDTH,
        encode=greedy,
    )


@functools.cache
def backend(name: str) -> backends.Backend:
    return backends.create(name, vocabulary())


def matcher(name: str, kind: GrammarKind, content: object, **options: object) -> Matcher:
    """A matcher, by way of a payload."""
    made = backend(name)
    grammar = made.load(made.compile(kind, content, options))
    return Matcher(grammar.parser(), vocabulary())


def schema_matcher(name: str, schema: object, **options: object) -> Matcher:
    return matcher(name, GrammarKind.JSON_SCHEMA, schema, **options)


def allowed(of: Matcher) -> set[int]:
    """Tokens that may follow."""
    row = np.zeros(vocabulary().num_words, np.int32)
    return bits(row) if of.fill(row) else set(range(WIDTH))


def bits(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def accepts(of: Matcher, text: str | bytes) -> bool:
    """Whether a text, byte by byte, is a whole one; masks and `accept` must agree on it."""
    data = text.encode() if isinstance(text, str) else text
    for byte in data:
        may = byte in allowed(of)
        assert of.accept(byte) == may
        if not may:
            return False
    assert (END in allowed(of)) == of.can_end
    return of.can_end


def choice_matcher(name: str, choices: list[str]) -> Matcher:
    start = "root ::=" if name == "xgrammar" else "start:"
    literals = (
        json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices
    )
    return matcher(name, GrammarKind.GRAMMAR, f"{start} {' | '.join(literals)}")


def spaced(name: str) -> dict[str, object]:
    """Options for bounded whitespace, in the words of each library."""
    if name == "xgrammar":
        return {"any_whitespace": True, "max_whitespace_cnt": 2}
    return {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,2}"}


def compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
