"""Constraints and tool calls of the offline `LLM`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.platform.errors import BadRequest, Unsupported
from plait.structured.params import StructuredOutputs
from plait.structured.reply import ReplyPlan
from plait.structured.tools import history
from plait.structured.tools.parser import Reply
from plait.structured.tools.prompt import tool_prompt
from plait.structured.tools.request import ToolWish, read_tools

if TYPE_CHECKING:
    from plait.platform.config import ModelInfo
    from plait.platform.core import CompiledGrammar, SamplingParams
    from plait.platform.offline.outputs import CompletionOutput
    from plait.platform.offline.sight import Seen
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.added import Vocabularies
    from plait.structured.pool import CompilePool
    from plait.structured.spec import GrammarSpec

# One for all, or one each.
Constraints = StructuredOutputs | Sequence[StructuredOutputs | None] | None


def each_constraint(given: Constraints, count: int) -> list[StructuredOutputs | None]:
    """One constraint for each of `count` prompts. Raises `BadRequest`."""
    if given is None or isinstance(given, StructuredOutputs):
        return [given] * count
    listed: list[Any] = list(given) if isinstance(given, Sequence) else [given]
    if any(each is not None and not isinstance(each, StructuredOutputs) for each in listed):
        raise BadRequest(
            "structured_outputs is a StructuredOutputs, one for all or one each",
            param="structured_outputs",
        )
    if len(listed) != count:
        raise BadRequest(
            f"{len(listed)} structured_outputs for {count} prompts: give one for all, or one each",
            param="structured_outputs",
        )
    return listed


class LocalGrammars:
    """Compiled grammars for one model. The compiler starts with the first."""

    def __init__(self, tokenizer: Tokenizer, model: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._pool: CompilePool | None = None
        self._vocabularies: Vocabularies | None = None

    def compile(self, spec: GrammarSpec, tokenizer: Tokenizer, width: int = 0) -> CompiledGrammar:
        """For the tokens that `tokenizer` has, as far as logits of `width` reach.

        Waits for it. Raises what the compilers refuse, with the place.
        """
        if self._pool is None or self._vocabularies is None:
            self._pool, self._vocabularies = self._opened(spec)
        vocabulary = self._vocabularies.base
        if tokenizer is not self._tokenizer:
            vocabulary = self._vocabularies.of(tokenizer, width)
        return self._pool.compile_blocking(spec, vocabulary=vocabulary)

    def _opened(self, spec: GrammarSpec) -> tuple[CompilePool, Vocabularies]:
        from plait.structured.added import Vocabularies
        from plait.structured.pool import CompilePool, PoolSettings
        from plait.structured.vocabulary import Vocabulary

        if not self._model.eos_token_ids:
            raise Unsupported(
                f"{spec.param}: this model has no end token, so an answer whose form is held could "
                "not end; leave it out",
                param=spec.param,
            )
        vocabularies = Vocabularies(Vocabulary.of_model(self._tokenizer, self._model))
        return CompilePool(vocabularies.base, PoolSettings(has_spare=False)), vocabularies

    def close(self) -> None:
        """End the compiler."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation, and what its reply may be."""

    text: str
    plan: ReplyPlan | None = None
    begins: bool | None = False  # whether the reply begins inside of thinking; None: it may
    seen: Seen | None = None  # its images

    @property
    def spec(self) -> GrammarSpec | None:
        """The grammar of the reply; None where it is free."""
        return None if self.plan is None else self.plan.grammar(self.begins)

    def params(self, params: SamplingParams) -> SamplingParams:
        """With the text of special tokens, where calls are marked by these."""
        if self.plan is None or not self.plan.shows_special:
            return params
        return dataclasses.replace(params, skip_special_tokens=False)

    def read(self, output: CompletionOutput) -> None:
        """Take an answer's text apart into content, thinking and calls."""
        if self.plan is None:
            return
        parser, reply = self.plan.parser(self.begins), Reply()
        ended = output.finish_reason or "stop", output.stop_reason
        for delta in (*parser.feed(output.text), *parser.end(*ended)):
            reply.add(delta)
        output.content = reply.content
        output.reasoning = reply.reasoning
        output.tool_calls = reply.calls


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any],
    spec: GrammarSpec | None,
) -> ChatPrompt:
    """Render a conversation. `template` may have tools, tool_choice and parallel_tool_calls."""
    options = dict(template)
    tools, choice = options.pop("tools", None), options.pop("tool_choice", None)
    wish = read_tools(tools, choice, options.pop("parallel_tool_calls", None))
    plan = ReplyPlan.of(tokenizer, spec, wish)
    shown = wish if wish is not None and wish.callable else None
    text = _render(tokenizer, messages, options, shown)
    if plan is None:
        return ChatPrompt(text=text)
    return ChatPrompt(text=text, plan=plan, begins=plan.begins(tokenizer, text))


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    options: dict[str, Any],
    wish: ToolWish | None,
) -> str:
    listed = [dict(message) for message in messages]
    for number, message in enumerate(listed):
        if message.get("tool_calls"):
            at = f"messages[{number}].tool_calls"
            message["tool_calls"] = history.read_calls(message["tool_calls"], at)
    if wish is None and not any("role" in m and history.has_calls([m]) for m in listed):
        return tokenizer.render_chat(messages, **options)
    shown = tool_prompt(tokenizer, listed, wish)
    return tokenizer.render_chat(shown.messages, tools=shown.tools, **options)
