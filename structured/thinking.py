"""Thinking that comes before an answer, in models whose chat template knows of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
MARKS = (OPEN, CLOSE)


def begins_thinking(tokenizer: Tokenizer, prompt: str, *, with_tools: bool = False) -> bool | None:
    """Whether the reply to a rendered prompt begins inside of thinking.

    None: it may begin with it. False: the prompt has closed it, or the template knows of none.
    """
    template = tokenizer.chat_template_for(with_tools=with_tools)
    if template is None or CLOSE not in template.source:
        return False
    end = prompt.rstrip()
    if end.endswith(OPEN):
        return True
    return False if end.endswith(CLOSE) else None
