"""What a request asks of its text, and the same once compiled. Plain data; both cross processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from plait.platform.core import CompiledGrammar

__all__ = ["CompiledGrammar", "GrammarKind", "GrammarSpec"]


class GrammarKind(StrEnum):
    """The languages in which a constraint can be written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # any JSON object; no content
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"  # GBNF/EBNF or Lark; told apart by their text
    STRUCTURAL_TAG = "structural_tag"
    OUTLINE = "outline"  # thinking, then tool calls or one of the above; see outline.py


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """One constraint as the client wrote it. Immutable; equal content is one grammar."""

    kind: GrammarKind
    content: Any = None  # schema or tag (JSON values), pattern, list of choices, grammar text
    param: str = "response_format"  # the request's field, for errors
    strict: bool = False  # closed objects are demanded, as OpenAI does
    options: dict[str, Any] = field(default_factory=dict)  # whitespace_pattern, any_form, …

    def param_of(self, option: str) -> str:
        """The request's field that has an option, for errors."""
        outer = self.param.partition(".")[0]
        return f"{outer}.{option}" if outer == "structured_outputs" else f"guided_{option}"
