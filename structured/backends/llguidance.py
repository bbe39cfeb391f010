"""llguidance: sound, compiles in about a millisecond, with bounds on each mask.

Its objects never raise for a grammar's sake; after a mistake they are in an error state for good.
So every call is followed by a look at that state, and nothing that could be refused is consumed
before it has been asked.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from plait.platform.errors import (
    BadRequest,
    GrammarTooComplex,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    UnsupportedSchemaKeyword,
)
from plait.structured.backends import LibraryError, ParserFault
from plait.structured.backends.lark import endless_rule
from plait.structured.spec import GrammarKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plait.structured.vocabulary import Mask, Vocabulary

# Parts of strings for which masks are computed once: what holds for all of a part need not be asked
# of its tokens. With lengths this close, masks near the end of a bounded string take 10 µs
# instead of 300.
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    r"[a-zA-Z0-9]+",
    *(f"{_IN_STRING}{{1,{most}}}" for most in (3, 5, 7, 9, 12, 16, 20, 30)),
    _IN_STRING + "+",
]

# Every option of the JSON compiler is set, since a schema could set what is not.
_COMPACT: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
}
# Without escapes by number: with them the same key could be written twice in an object.
_SOUND: dict[str, Any] = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}

# Last in each grammar, where it overrules. Otherwise masks hold but one spelling of what is forced,
# for which the library calls back into a tokenizer; the tokens of forced text are our own choice.
_NO_FORCING = '%llguidance {"no_forcing": true}'

_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 200_000,  # about 14 ms
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,  # of 1 to 2 kB
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,  # a schema is nobody else's to read
}


# The library spells forced text out to its end, which may be megabytes away, and takes seconds.
_MAX_FORCED_BYTES = 64 * 1024


class LLGuidanceBackend:
    """llguidance for one vocabulary."""

    opens_by_compiling = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._library = llguidance
        self._num_bytes = vocabulary.num_words * 4
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            eos_token=list(vocabulary.end_ids),
            slices=_SLICES,
        )
        self._built: tuple[bytes, Any] | None = None  # the last payload and its matcher

    def compile(self, kind: GrammarKind, content: Any, options: Mapping[str, Any]) -> bytes:
        """The payload is the grammar as Lark; making a matcher of it is what could fail."""
        text = self._lark(kind, content, options)
        fresh = self._matcher(text)
        matcher = fresh.deep_copy()  # what is asked changes it
        # The first mask is part of it: some bounds, and a start that has no end, show only there.
        allowed = not matcher.is_error() and any(matcher.compute_bitmask())
        if matcher.is_error():
            error = matcher.get_error()
            raise _refusal(kind, error) from LibraryError(error)
        if not allowed:
            raise _refusal(kind, "no text fulfils it")
        forced = matcher.compute_ff_bytes()
        if matcher.is_error():
            raise _refusal(kind, matcher.get_error())
        if len(forced) > _MAX_FORCED_BYTES:
            raise _refusal(kind, f"it forces a text over the limit of {_MAX_FORCED_BYTES:,} bytes")
        payload = text.encode()
        self._built = payload, fresh
        return payload

    def _lark(self, kind: GrammarKind, content: Any, options: Mapping[str, Any]) -> str:
        match kind:
            case GrammarKind.JSON_SCHEMA:
                text = f"start: %json {json_text(content, options)}"
            case GrammarKind.REGEX:
                made = json.loads(self._library.LLMatcher.grammar_from_regex(content))
                text = made["grammars"][0]["lark_grammar"]
            case GrammarKind.GRAMMAR:
                if names_guidance(content):
                    raise InvalidGrammar("x-guidance has no place in a grammar")
                if endless := endless_rule(content):
                    raise InvalidGrammar(
                        f"the grammar cannot be compiled: its rule {endless!r} never ends, as each "
                        "way through it leads to itself; give it an alternative that does not"
                    )
                text = content
            case GrammarKind.OUTLINE:
                text = content  # written by us, options of its schemas and all
            case GrammarKind.STRUCTURAL_TAG:
                raise InvalidGrammar(
                    "the grammar cannot be compiled: a structural tag needs xgrammar"
                )
        return f"{text}\n{_NO_FORCING}\n"

    def _matcher(self, text: str) -> Any:
        return self._library.LLMatcher(self._tokens, text, log_level=0, limits=self._limits)

    def load(self, payload: bytes) -> LLGuidanceGrammar:
        """Compiles anew, which is as fast as reading a compiled one would be."""
        built, self._built = self._built, None
        if built is not None and built[0] == payload:
            matcher = built[1]
        else:
            matcher = self._matcher(payload.decode())
        _check(matcher)
        return LLGuidanceGrammar(matcher, self._num_bytes)


class LLGuidanceGrammar:
    """A matcher that never moves; parsers are copies of it."""

    def __init__(self, matcher: Any, num_bytes: int) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        self.asks_forced = True

    def parser(self) -> LLGuidanceParser:
        """A parser at the beginning, in 2 µs."""
        return LLGuidanceParser(self._matcher.deep_copy(), self._num_bytes, self)


class LLGuidanceParser:
    """`Parser` over llguidance's matcher."""

    def __init__(self, matcher: Any, num_bytes: int, grammar: LLGuidanceGrammar) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        self._grammar = grammar

    def fill(self, row: Mask) -> bool:
        """Without the interpreter's lock."""
        if not row.flags.c_contiguous or row.nbytes != self._num_bytes:
            raise ValueError(f"a mask row has {row.nbytes} bytes, not {self._num_bytes}, dense")
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._num_bytes)
        _check(self._matcher)
        return True

    def accept(self, token: int) -> bool:
        """See `Parser`."""
        if self.count_legal([token]) == 0:
            return False
        self._matcher.consume_token(token)
        _check(self._matcher)
        return True

    def count_legal(self, tokens: list[int]) -> int:
        """See `Parser`."""
        num_legal: int = self._matcher.validate_tokens(tokens)
        _check(self._matcher)
        return num_legal

    def rollback(self, num_tokens: int) -> None:
        """See `Parser`."""
        self._matcher.rollback(num_tokens)
        _check(self._matcher)

    @property
    def complete(self) -> bool:
        """See `Parser`."""
        complete: bool = self._matcher.is_accepting()
        _check(self._matcher)
        return complete

    def forced_bytes(self) -> bytes:
        """See `Parser`; none any more once a place has forced far too much."""
        if not self._grammar.asks_forced:
            return b""
        forced: bytes = self._matcher.compute_ff_bytes()
        _check(self._matcher)
        self._grammar.asks_forced = len(forced) <= _MAX_FORCED_BYTES
        return forced

    def copy(self) -> LLGuidanceParser:
        """See `Parser`."""
        return LLGuidanceParser(self._matcher.deep_copy(), self._num_bytes, self._grammar)


class _Tokens:
    """The vocabulary in the form that `TokenizerWrapper` reads; padding are tokens of no bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        padding = [b""] * (vocabulary.width - len(vocabulary.pieces))
        self.tokens = [*vocabulary.pieces, *padding]
        self.special_token_ids = sorted(vocabulary.special_ids)
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        """Asked only for the tokens of forced text, of which there is none: see `_NO_FORCING`."""
        raise NotImplementedError


def json_text(schema: Any, options: Mapping[str, Any]) -> str:
    """A schema with all options of the JSON compiler; its own `x-guidance` can set none."""
    if schema is False:
        raise InvalidSchema("the schema cannot be compiled: nothing fits `false`")
    guidance = {**_COMPACT, **options, **_SOUND}
    rules = {} if schema is True else schema
    return json.dumps({**rules, "x-guidance": guidance}, ensure_ascii=False)


def names_guidance(text: str) -> bool:
    """Whether a Lark text has options for a schema in it, in any spelling that JSON has for it."""
    plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)
    return "x-guidance" in plain


def _check(matcher: Any) -> None:
    """An error state is for good: masks then allow an end token and nothing else."""
    if matcher.is_error():
        raise ParserFault(_first_line(matcher.get_error()))


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]


def _refusal(kind: GrammarKind, text: str) -> BadRequest:
    """The user's error for one of llguidance's, which shows the grammar below its first line."""
    schema = kind is GrammarKind.JSON_SCHEMA
    if schema:
        text = _first_line(text).rpartition("failed to compile JSON schema: ")[2]
    text = text.strip()[:2000]
    if any(word in text for word in ("too large", "too many", "fuel", "limit", "too complex")):
        return GrammarTooComplex(f"the grammar is beyond a bound: {text}")
    if schema and "nimplemented" in text:
        return UnsupportedSchemaKeyword(f"the schema cannot be enforced: {text}")
    if schema:
        return InvalidSchema(f"the schema cannot be compiled: {text}")
    if kind is GrammarKind.REGEX:
        return InvalidRegex(f"the pattern cannot be compiled: {text}")
    return InvalidGrammar(f"the grammar cannot be compiled: {text}")
