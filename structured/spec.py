"""What a request asks of its text, and the same once compiled. Plain data; both cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class GrammarKind(StrEnum):
    """The languages in which a constraint can be written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object; no content
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"  # GBNF/EBNF or Lark; told apart by their text
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """One constraint as the client wrote it. Immutable; equal content is one grammar."""

    kind: GrammarKind
    content: Any = None  # schema or tag (JSON values), pattern, list of choices, grammar text
    param: str = "response_format"  # the request's field, for errors
    strict: bool = False  # closed objects are demanded, as OpenAI does
    options: dict[str, Any] = field(default_factory=dict)  # whitespace_pattern, any_whitespace, …


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGrammar:
    """A grammar ready for matchers, for one vocabulary. `Request.grammar` carries it."""

    key: str  # SHA-256 (hex) over backend, its version, vocabulary, canonical grammar, options
    backend: str  # "xgrammar" | "llguidance"
    payload: bytes  # what the backend makes a matcher from
    num_bytes: int  # that a matcher's grammar takes in memory, about
