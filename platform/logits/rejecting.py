"""Rejection sampling in the steps: drafts that a model drew are verified by what it drew them from.

By default a draft model draws with the target's own noise, and verification never looks at its
probabilities (see `sampling`). Here it draws with noise of its own, and keeps what each draft was
drawn from in `Sequence.draft_probs`; the step accepts by the ratio of both. What comes out has the
same distribution, but not the same bytes: with a seed too it depends on where drafts begin, and so
on the load. A span is verified either way as a whole. All other drafts stay coupled:

    greedy requests     nothing is drawn
    grammars            look at drafts themselves, which rejection must not (`rejection.is_drawn`)
    text                was not drawn from anything; rejection would accept it just as often
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plait.platform.core import Sequence, Span, SpanResult
from plait.platform.errors import BadRequest
from plait.platform.logits.logprobs import token_logprobs
from plait.platform.logits.token_filters import largest
from plait.platform.sampling import (
    MIN_TEMPERATURE,
    NOTHING_LEFT,
    Floats,
    NoToken,
    Row,
    Sampler,
    check_finite,
    kept_values,
)
from plait.speculative.rejection import Distribution, RejectionSampler

# Tokens that a draft is drawn among: what it is drawn from is kept until it is verified. Any
# distribution serves, so this costs no more than what the draft model gives to all others.
MAX_KEPT = 1024


class RejectingSampler(Sampler):
    """A sampler for both sides: `draw` is the draft model's, `sample` the target's."""

    def draw(
        self, seq: Sequence, drafts: tuple[int, ...], logits: Floats
    ) -> tuple[int, Distribution] | None:
        """A draft behind `seq` and `drafts`, and what it was drawn from; None: nothing can be.

        `logits`: [V] of the draft model, of `seq`'s own vocabulary.
        """
        with np.errstate(all="ignore"):
            try:
                row = Row(logits=logits, raw=logits)
                q = self._distribution(seq, drafts, row, max_kept=MAX_KEPT)
            except NoToken:
                return None
            return self._rejection(seq).draw(q, len(seq.tokens) + len(drafts)), q

    def _verify(self, span: Span, rows: list[Row]) -> SpanResult:
        seq, drafts = span.sequence, span.drafts
        if not drafts or not seq.draft_probs:
            return super()._verify(span, rows)
        targets = self._distributions(span, rows)
        q = seq.draft_probs[: len(drafts)]
        tokens = self._rejection(seq).verify(targets, q, drafts, len(seq.tokens))
        num_top = seq.request.params.logprobs
        if num_top is None:
            return SpanResult(token_ids=tokens)
        logprobs = [token_logprobs(r.raw, t, num_top) for r, t in zip(rows, tokens, strict=False)]
        return SpanResult(token_ids=tokens, logprobs=tuple(logprobs))

    def _rejection(self, seq: Sequence) -> RejectionSampler:
        return RejectionSampler(self._noise_of(self._width(seq)), seq.seed, seq.index)

    def _distributions(self, span: Span, rows: list[Row]) -> Iterator[Distribution]:
        """Of each row in turn, as though the drafts before it were output."""
        for i, row in enumerate(rows):
            yield self._distribution(span.sequence, span.drafts[:i], row)

    def _distribution(
        self, seq: Sequence, drafts: tuple[int, ...], row: Row, max_kept: int | None = None
    ) -> Distribution:
        """That from which the token behind `seq` and `drafts` is to be drawn.

        With `max_kept`, among so many likeliest tokens only.
        """
        logits, changed = self._changed(seq, drafts, row)
        best = int(logits.argmax())
        if changed and logits[best] == -np.inf:
            raise NoToken(NOTHING_LEFT, BadRequest.code)
        check_finite(logits, best)
        temperature = max(seq.request.params.temperature, MIN_TEMPERATURE)
        values, ids = kept_values(logits, temperature, seq.request.params)
        if max_kept is not None and len(values) > max_kept:
            places = np.sort(largest(values, max_kept))
            values, ids = values[places], places if ids is None else ids[places]
        weights = np.exp((values.astype(np.float64) - float(values.max())) / temperature)
        return Distribution(np.arange(len(values)) if ids is None else ids, weights / weights.sum())
