"""How families of models write tool calls. A format is text around a name and its arguments.

    {open}{before_name}NAME{before_arguments}ARGUMENTS{after_arguments}
    {between}NAME{before_arguments}ARGUMENTS{after_arguments}{close}

The grammar holds the model to it to the letter, so that the parser needs no guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The markup of one family. `open` never occurs in text that is no call."""

    name: str
    open: str
    before_name: str = ""
    before_arguments: str
    after_arguments: str = ""
    between: str
    close: str = ""
    only_first: bool = False  # a call is the whole reply, not something that follows text
    one_call: bool = False  # the family knows no several calls at once
    tokens: tuple[str, ...] = ()  # parts that are single tokens, where the tokenizer says so
    short_ids: bool = False  # templates demand ids of nine letters and digits


HERMES = ToolFormat(
    name="hermes",
    open="<tool_call>",
    before_name='\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n</tool_call>",
    between='\n<tool_call>\n{"name": "',
    tokens=("<tool_call>", "</tool_call>"),
)
LLAMA = ToolFormat(
    name="llama",
    open='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    between="",
    only_first=True,
    one_call=True,
)
MISTRAL = ToolFormat(
    name="mistral",
    open="[TOOL_CALLS]",
    before_name='[{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    between=', {"name": "',
    close="]",
    tokens=("[TOOL_CALLS]",),
    short_ids=True,
)
MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    open="[TOOL_CALLS]",
    before_arguments="[ARGS]",
    between="[TOOL_CALLS]",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
    short_ids=True,
)

# The first whose sign stands in the template.
_SIGNS: tuple[tuple[ToolFormat, Callable[[str], bool]], ...] = (
    (MISTRAL_ARGS, lambda text: "[TOOL_CALLS]" in text and "[ARGS]" in text),
    (MISTRAL, lambda text: "[TOOL_CALLS]" in text),
    (HERMES, lambda text: "<tool_call>" in text and "<function=" not in text),
    (LLAMA, lambda text: '"parameters": ' in text and "<|start_header_id|>" in text),
)


def detect(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it teaches none that is known here."""
    return next((form for form, fits in _SIGNS if fits(template)), None)
