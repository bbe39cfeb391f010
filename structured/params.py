"""`StructuredOutputs`: a constraint as Python programs write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from plait.platform.errors import BadRequest
from plait.structured.requests import read_constraint
from plait.structured.spec import GrammarSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What an answer must obey: exactly one of the first six. Names are vLLM's.

    `json` is a JSON schema as a mapping or text, or a pydantic model.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # GBNF/EBNF, or Lark
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    any_whitespace: bool = False  # spaces between JSON's tokens; by default none
    any_form: bool | None = None  # keys in any order, 1.0 for 1; None: as '$schema' has it
    assert_formats: bool | None = None  # hold to 'format'; None: unless '$schema' has it otherwise
    disable_additional_properties: bool = False

    def spec(self) -> GrammarSpec:
        """As the compilers take it. Raises `BadRequest`."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        schema_of = getattr(self.json, "model_json_schema", None)
        if schema_of is not None:
            given["json"] = schema_of()
        spec = read_constraint({"structured_outputs": given})
        if spec is None:
            raise BadRequest(
                "StructuredOutputs(json_object=False) asks for nothing; leave it out",
                param="structured_outputs",
            )
        return spec
