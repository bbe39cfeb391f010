"""What a step computes and gives: `StepPlan`, `StepResult`, and the `Event`s that come of it.

Every step makes these anew, so each is a `msgspec.Struct`: one is made in a tenth of a frozen
dataclass's time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from plait.platform.core.sequence import FinishReason, Sequence


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A run of consecutive tokens of one sequence that one step computes.

    Tokens are `(sequence.tokens + drafts)[start : start + num_tokens]`. Logits are needed for
    the last `num_samples` rows of the span (0 while the prompt is still incomplete, else
    1 + number of drafts), and for every prompt row where `prompt_logprobs` is wanted.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int
    drafts: tuple[int, ...] = ()
    block_ids: tuple[tuple[int, ...], ...] = ()  # per KV group, snapshot covering the span
    wants_prompt_logprobs: bool = False


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler chose for one step. Plain data, no tensors."""

    step_id: int
    spans: tuple[Span, ...]
    images: tuple[Any, ...] = ()  # image items to encode first
    finished: tuple[Sequence, ...] = ()  # ended while planning (deadline, impossible)
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows that the step computes."""
        return sum(span.num_tokens for span in self.spans)


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The chosen token's natural-log probability and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()


class SpanResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one span produced: accepted tokens (drafts that held, then one new token).

    `error` set: this sequence alone must end (NaN logits, say); its tokens are ignored.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # for prompt tokens start+1 … of this span
    error: str | None = None
    error_code: str = "internal_error"


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results in the order of `StepPlan.spans`."""

    spans: tuple[SpanResult, ...]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step added to one sequence; the last one carries `finish_reason`.

    `text` is the delta that may be shown now (stop strings held back, characters whole); the
    deltas of a sequence concatenate to its full text. `error` is `(code, message)`.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # once, when the prompt is done
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0  # verified so far
    num_accepted_tokens: int = 0  # of these, how many are among the output
    draft_counts: tuple[tuple[str, int, int], ...] = ()  # (source, verified, accepted), by name
    queued_s: float = 0.0  # seconds from `Engine.add` to its first step
    num_preemptions: int = 0
    error: tuple[str, str] | None = None
