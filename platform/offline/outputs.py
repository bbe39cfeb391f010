"""What the offline `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.platform.core import Event, FinishReason, TokenLogprobs
from plait.structured.tools.parser import ToolCall


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One answer. `logprobs` has an entry per token where the parameters asked for it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it
    error: str | None = None  # why finish_reason is "error"
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)  # source → verified, output
    # Of chats with tools or a constraint, taken from `text` once the answer has ended:
    content: str | None = None  # without thinking and calls
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def cumulative_logprob(self) -> float | None:
        """Natural-log probability of the whole answer, where logprobs were asked for."""
        return None if self.logprobs is None else sum(t.logprob for t in self.logprobs)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One prompt with its `n` answers, in the order of their index."""

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] | None = None  # for every prompt token but the first
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    adapter_generations: tuple[str, ...] = ()  # of the adapters that answered; empty: the base

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    def apply(self, event: Event) -> CompletionDelta:
        """Add what a step made known; returns just that."""
        output = self.outputs[event.index]
        output.text += event.text
        output.token_ids.extend(event.token_ids)
        if output.logprobs is not None:
            output.logprobs.extend(event.logprobs)
        output.drafts.update((s, (verified, held)) for s, verified, held in event.draft_counts)
        output.finish_reason = event.finish_reason
        output.stop_reason = event.stop_reason
        output.error = None if event.error is None else event.error[1]
        if event.index == 0:
            self.num_cached_tokens = event.num_cached_tokens
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = list(event.prompt_logprobs)
        return CompletionDelta(
            index=event.index,
            text=event.text,
            token_ids=event.token_ids,
            logprobs=event.logprobs,
            finish_reason=event.finish_reason,
            stop_reason=event.stop_reason,
            error=output.error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionDelta:
    """What one step added to one answer; the deltas of an answer concatenate to its text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
