"""What the reply to a chat may be, from the request's fields to a grammar and a reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.platform.errors import BadRequest
from plait.structured import thinking
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.tools.formats import HERMES, ToolFormat
from plait.structured.tools.parser import ReplyParser
from plait.structured.tools.prompt import knows_tools

if TYPE_CHECKING:
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.tools.request import ToolWish


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """A constraint, tools that may be called, or both. `form` is None without such tools."""

    constraint: GrammarSpec | None
    wish: ToolWish | None
    form: ToolFormat | None
    tokens: Mapping[str, int]  # ids of the special tokens among the marks, by text

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, constraint: GrammarSpec | None, wish: ToolWish | None
    ) -> ReplyPlan | None:
        """None where the reply is free. Raises `BadRequest` where the two contradict."""
        if wish is not None and not wish.callable:
            wish = None
        if constraint is None and wish is None:
            return None
        if constraint is not None and wish is not None and wish.required:
            raise BadRequest(
                f"{constraint.param} and a tool_choice that demands a call exclude each other: the "
                "reply is the call; use tool_choice auto, or leave one out",
                param="tool_choice",
            )
        form = None if wish is None else knows_tools(tokenizer) or HERMES
        marks = (*thinking.MARKS, *(() if form is None else form.tokens))
        return cls(constraint=constraint, wish=wish, form=form, tokens=_special(tokenizer, marks))

    @property
    def shows_special(self) -> bool:
        """Whether the reader needs the text of special tokens."""
        return bool(self.tokens)

    def begins(self, tokenizer: Tokenizer, prompt: str) -> bool | None:
        """Whether the reply to a rendered prompt begins inside of thinking; None: it may."""
        if self.constraint is not None and self.constraint.kind in _WHOLE:
            return False  # it says itself what comes first
        return thinking.begins_thinking(tokenizer, prompt, with_tools=self.wish is not None)

    def grammar(self, begins: bool | None) -> GrammarSpec:
        """The grammar over the whole reply."""
        if self.wish is None and begins is False:
            assert self.constraint is not None
            return self.constraint
        from plait.structured import outline  # what proves schemas takes a sixth of a second

        content: dict[str, Any] = {"thinking": self._thinking(begins)}
        answer = None
        if self.constraint is not None:
            answer = {"kind": str(self.constraint.kind), "content": self.constraint.content}
        if self.wish is None:
            content["body"] = answer
        else:
            assert self.form is not None
            content["body"] = outline.tools_body(self.wish, self.form, self.tokens)
            content["answer"] = answer
        base = self.constraint
        return GrammarSpec(
            kind=GrammarKind.OUTLINE,
            content=content,
            param="tools" if base is None else base.param,
            strict=base is not None and base.strict,
            options={} if base is None else base.options,
        )

    def _thinking(self, begins: bool | None) -> dict[str, Any] | None:
        if begins is False:
            return None
        from plait.structured import outline

        opened, closed = (outline.pieces(mark, self.tokens) for mark in thinking.MARKS)
        return {"begun": begins is True, "open": opened, "close": closed}

    def parser(self, begins: bool | None) -> ReplyParser:
        """A reader of one reply."""
        return ReplyParser(self.form, thinking=begins, marks=thinking.MARKS)


# Grammars that are over a whole reply, thinking and all, as their author wrote them.
_WHOLE = frozenset({GrammarKind.STRUCTURAL_TAG})


def _special(tokenizer: Tokenizer, marks: tuple[str, ...]) -> dict[str, int]:
    if not marks:
        return {}
    texts = {tokenizer.token_text(i): i for i in tokenizer.bytes_table.special_ids}
    return {mark: texts[mark] for mark in marks if mark in texts}
