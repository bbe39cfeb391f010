"""xgrammar: fast masks, computed while compiling.

It ignores keywords without a word, so only what the router has proved for it may come here.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import TYPE_CHECKING, Any

from plait.platform.errors import (
    BadRequest,
    GrammarTooComplex,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
)
from plait.structured.backends import ParserFault
from plait.structured.backends.reach import Reach
from plait.structured.spec import GrammarKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plait.structured.vocabulary import Mask, Vocabulary

_COMPACT = {"any_whitespace": False, "separators": (",", ":")}
_CACHE_BYTES = 128 << 20  # of the rules that grammars share, in the process that compiles


class XGrammarBackend:
    """xgrammar for one vocabulary."""

    opens_by_compiling = False

    def __init__(self, vocabulary: Vocabulary, library: Any) -> None:
        self._library = library
        # No stop token may be missing: the library would look for one by its name.
        self._tokens = self._library.TokenizerInfo(
            vocabulary.hidden_pieces(),
            vocab_size=vocabulary.width,
            stop_token_ids=list(vocabulary.end_ids),
        )
        # One thread: more gave the same total on two cores, and a step may want the other.
        self._compiler = self._library.GrammarCompiler(
            self._tokens, max_threads=1, cache_limit_bytes=_CACHE_BYTES
        )

    def compile(self, kind: GrammarKind, content: Any, options: Mapping[str, Any]) -> bytes:
        """Eagerly, with all masks: what is left for later could not be stopped there."""
        try:
            compiled = self._compile(kind, content, options)
            if fault := Reach(compiled.grammar.serialize_json()).fault():
                raise _refusal(kind, ValueError(fault))
            text: str = compiled.serialize_json()
        except (RuntimeError, ValueError, TypeError) as error:
            raise _refusal(kind, error) from None
        return text.encode()

    def _compile(self, kind: GrammarKind, content: Any, options: Mapping[str, Any]) -> Any:
        compiler = self._compiler
        match kind:
            case GrammarKind.JSON_SCHEMA:
                schema = json.dumps(content, ensure_ascii=False)
                # Strict mode would close objects that the schema leaves open.
                return compiler.compile_json_schema(
                    schema, **{**_COMPACT, **options, "strict_mode": False}
                )
            case GrammarKind.REGEX:
                return compiler.compile_regex(content)
            case GrammarKind.GRAMMAR:
                return compiler.compile_grammar(content)
            case GrammarKind.STRUCTURAL_TAG:
                return compiler.compile_structural_tag(json.dumps(content, ensure_ascii=False))
        raise ValueError(f"the router leaves no {kind}")

    def load(self, payload: bytes) -> XGrammarGrammar:
        """Takes 10 ms for each 100 kB, without the interpreter's lock."""
        try:
            compiled = self._library.CompiledGrammar.deserialize_json(
                payload.decode(), self._tokens
            )
        except RuntimeError as error:
            raise ParserFault(f"xgrammar cannot read its own grammar: {error}") from error
        return XGrammarGrammar(self._library, compiled)


class XGrammarGrammar:
    """A compiled grammar and the class of its matchers."""

    def __init__(self, library: Any, compiled: Any) -> None:
        self._library = library
        self._compiled = compiled

    def parser(self) -> XGrammarParser:
        """A parser at the beginning."""
        return XGrammarParser(self._library.GrammarMatcher(self._compiled))


class XGrammarParser:
    """`Parser` over xgrammar's matcher. End tokens never reach it, so it never terminates."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, row: Mask) -> bool:
        """See `Parser`."""
        try:
            needed: bool = self._matcher.fill_next_token_bitmask(row[None], 0)
        except RuntimeError as error:
            raise ParserFault(str(error)) from error
        return needed

    def accept(self, token: int) -> bool:
        """See `Parser`."""
        accepted: bool = self._matcher.accept_token(token)
        return accepted

    def count_legal(self, tokens: list[int]) -> int:
        """Advances and goes back; about a microsecond each."""
        num_legal = 0
        for token in tokens:
            if not self._matcher.accept_token(token):
                break
            num_legal += 1
        if num_legal:
            self._matcher.rollback(num_legal)
        return num_legal

    def rollback(self, num_tokens: int) -> None:
        """See `Parser`."""
        self._matcher.rollback(num_tokens)

    @property
    def complete(self) -> bool:
        """See `Parser`."""
        complete: bool = self._matcher.is_completed()
        return complete

    def forced_bytes(self) -> bytes:
        """Whole characters only."""
        text: str = self._matcher.find_jump_forward_string()
        return text.encode()

    def copy(self) -> XGrammarParser:
        """See `Parser`."""
        return XGrammarParser(self._matcher.fork())


def _refusal(kind: GrammarKind, error: Exception) -> BadRequest:
    """The user's error for one of xgrammar's, which begin with a time and a source line."""
    text = str(error).strip()
    if "bad_alloc" in text or isinstance(error, MemoryError):
        return GrammarTooComplex("compiling the grammar takes too much memory")
    text = text.rpartition(".cc:")[2].partition(": ")[2] or text
    match kind:
        case GrammarKind.JSON_SCHEMA:
            return InvalidSchema(f"the schema cannot be compiled: {text}")
        case GrammarKind.REGEX:
            return InvalidRegex(f"the pattern cannot be compiled: {text}")
    return InvalidGrammar(f"the grammar cannot be compiled: {text}")


def load_library(*, light: bool = False) -> Any:
    """Imports xgrammar.

    `light` does without torch and transformers, which its Python layer names and needs for other
    things, where they are not loaded. In a process that only compiles, that takes 0.35 s and 55 MB
    instead of 3.3 s and 260 MB. No other thread may be about to import them.
    """
    absent = [name for name in ("torch", "transformers") if name not in sys.modules]
    if "xgrammar" in sys.modules or not light or not absent:
        return importlib.import_module("xgrammar")
    try:
        return _import_without(absent)
    except (ImportError, AttributeError, TypeError):
        for name in [n for n in sys.modules if n.partition(".")[0] in ("xgrammar", "tvm_ffi")]:
            del sys.modules[name]
        return importlib.import_module("xgrammar")


class _Anything:
    """Stands for any class of an absent library."""


class _Absent(types.ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything if name[:1].isupper() else lambda *_args, **_kwargs: None


def _import_without(absent: list[str]) -> Any:
    try:
        if "torch" in absent:
            sys.modules["torch"] = None  # type: ignore[assignment]
        importlib.import_module("tvm_ffi")  # goes without it where it is missing
        sys.modules |= {name: _Absent(name) for name in absent}
        return importlib.import_module("xgrammar")
    finally:
        for name in absent:
            sys.modules.pop(name, None)
