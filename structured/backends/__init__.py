"""The grammar libraries behind one shape: compile to bytes, load, parse token by token.

Both fill the same rows of bits, so one batch may hold sequences of either. What they do with end
tokens, wrong tokens and roll-backs differs; `plait.structured.matcher` keeps these from them, so
that a parser is only asked what both answer alike.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from plait.platform.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plait.structured.spec import GrammarKind
    from plait.structured.vocabulary import Mask, Vocabulary

NAMES = ("xgrammar", "llguidance")


class Parser(Protocol):
    """Where one text stands in its grammar. Never given an end token, or an id without bytes.

    Methods raise `ParserFault` where the library breaks down; the parser is of no use then.
    """

    def fill(self, row: Mask) -> bool:
        """Write which tokens may follow, end tokens included; False: all, the row is untouched."""
        ...

    def accept(self, token: int) -> bool:
        """Advance; False where the token may not follow, and nothing has changed then."""
        ...

    def count_legal(self, tokens: list[int]) -> int:
        """How many of `tokens` may follow in a row. Changes nothing."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens, of which there are at least so many."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        ...

    def forced_bytes(self) -> bytes:
        """The bytes that must follow; none where there is a choice."""
        ...

    def copy(self) -> Parser:
        """An independent parser at the same place."""
        ...


class Grammar(Protocol):
    """A loaded grammar, shared by the parsers made from it."""

    def parser(self) -> Parser:
        """A parser at the beginning. May be called from any thread."""
        ...


class Backend(Protocol):
    """One library, for one vocabulary. Thread-safe."""

    opens_by_compiling: bool  # `load` does all that `compile` did

    def compile(self, kind: GrammarKind, content: Any, options: Mapping[str, Any]) -> bytes:
        """What `load` takes. Content and options are those of a `Route`.

        Raises `InvalidGrammar` and its like, or `GrammarTooComplex`; the cause may be a
        `LibraryError`.
        """
        ...

    def load(self, payload: bytes) -> Grammar:
        """The grammar of a payload that `compile` gave. Raises `ParserFault`.

        What `compile` has just built may be handed out as it is, once.
        """
        ...


class LibraryError(Exception):
    """What a library said of a grammar that it cannot build, in its own words."""


class ParserFault(Exception):
    """A library broke down on a grammar that it had compiled: our fault, not the user's."""


@lru_cache(maxsize=8)
def version(name: str) -> str:
    """The installed version of a backend's library; to look takes a millisecond."""
    from importlib.metadata import version as installed

    return installed(name)


# What its masks were proven with, by the suite and the property tests; xgrammar's own list is in
# `schema.prove`, and without it everything goes to llguidance.
LLGUIDANCE_FROM, LLGUIDANCE_BELOW = (1, 9, 1), (2,)


def check_version(name: str) -> None:
    """Raise `Unsupported` for a version that nothing is known of."""
    if name != "llguidance":
        return
    installed = version(name)
    numbers = tuple(int(part) for part in re.findall(r"\d+", installed)[:3])
    if not LLGUIDANCE_FROM <= numbers < LLGUIDANCE_BELOW:
        raise Unsupported(
            f"constrained answers are not served with llguidance {installed}, whose masks are not "
            "tested: install llguidance>=1.9.1,<2"
        )


def create(name: str, vocabulary: Vocabulary, *, only_compiles: bool = False) -> Backend:
    """The backend of that name; loading its library takes up to half a second.

    With `only_compiles`, libraries that compiling does not need are left out. Masks are as fast as
    elsewhere: a trial measures what the engine will have.
    """
    match name:
        case "xgrammar":
            from plait.structured.backends.xgrammar import XGrammarBackend, load_library

            return XGrammarBackend(vocabulary, load_library(light=only_compiles))
        case "llguidance":
            from plait.structured.backends.llguidance import LLGuidanceBackend

            return LLGuidanceBackend(vocabulary)
    raise ValueError(f"no grammar backend is called {name!r}")
