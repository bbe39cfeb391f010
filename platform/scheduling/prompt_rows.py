"""Logprobs of prompt tokens: which rows have given theirs, so that each is given once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.core import Sequence, Span, SpanResult, TokenLogprobs


class PromptRows:
    """Per sequence that wants prompt logprobs, the number of its rows that have given theirs."""

    def __init__(self) -> None:
        self._given: dict[int, int] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._given

    def __len__(self) -> int:
        return len(self._given)

    def open(self, sequence: Sequence) -> None:
        """Know a new leader; its siblings give none."""
        if sequence.request.params.prompt_logprobs is not None:
            self._given[sequence.seq_id] = 0

    def close(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._given.pop(sequence.seq_id, None)

    def hit_limit(self, sequence: Sequence) -> int:
        """How many tokens may be found in the cache.

        A row found there is not computed, so it has no prompt logprobs: a request that wants
        them takes hits only over rows that have given theirs, so none at first.
        """
        given = self._given.get(sequence.seq_id)
        if given is None or given >= sequence.num_prompt_tokens - 1:
            return len(sequence.tokens)
        return given

    def wants(self, sequence: Sequence, end: int) -> bool:
        """Whether rows before `end` have prompt logprobs that were not given yet."""
        given = self._given.get(sequence.seq_id)
        return given is not None and given < _rows_end(sequence, end)

    def take(self, span: Span, outcome: SpanResult) -> tuple[TokenLogprobs, ...]:
        """The new ones of a result. Rows may be computed again, after parking."""
        given = self._given.get(span.sequence.seq_id)
        if given is None or not span.wants_prompt_logprobs:
            return ()
        self._given[span.sequence.seq_id] = _rows_end(span.sequence, span.start + span.num_tokens)
        return outcome.prompt_logprobs[given - span.start :]


def contradiction(span: Span, outcome: SpanResult) -> str | None:
    """Why a result cannot be one of this span, or None."""
    tokens, rows = outcome.token_ids, 0
    if span.wants_prompt_logprobs:
        rows = _rows_end(span.sequence, span.start + span.num_tokens) - span.start
    if rows != len(outcome.prompt_logprobs):
        return f"{len(outcome.prompt_logprobs)} prompt logprobs came back for {rows} rows"
    if bool(tokens) != bool(span.num_samples) or len(tokens) > span.num_samples:
        return f"{len(tokens)} tokens came back for {span.num_samples} sampled rows"
    if tokens[:-1] != span.drafts[: len(tokens) - 1 if tokens else 0]:
        return "accepted tokens are not the drafts that were verified"
    return None


def _rows_end(sequence: Sequence, end: int) -> int:
    """Rows before this have a next token in the prompt, for a span that ends at `end`."""
    return min(end, sequence.num_prompt_tokens - 1)
