"""Chooses tokens: from rows of logits to a `StepResult`.

For each row of a span the *target's own* sample is drawn, exactly as without drafts, as though
the drafts before it were already output; drafts are accepted while they equal it. The token
after them is then already right. So drafts can change neither text nor distribution, and every
option (penalties, masks, logprobs, …) works with them because there is one path for all.

Rows are worked on one at a time: each is a long vector, and what a row gives cannot depend on
its neighbours. A greedy row without further options costs its argmax and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.platform import penalties
from plait.platform.core import Sequence, Span, SpanResult, StepPlan, StepResult, TokenLogprobs
from plait.platform.logprobs import token_logprobs
from plait.platform.noise import Noise, stream_key
from plait.platform.ops.gumbel_argmax import gumbel_argmax
from plait.platform.token_filters import kept_tokens

if TYPE_CHECKING:
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.executor import Executor

Floats = npt.NDArray[np.float32]

MAX_LOGIT_ROWS = 64  # made at a time: bounds the memory of logits, above all of prompt logprobs
# Lower temperatures act as this one: a logit ahead by 0.01 is then ahead by 100 nats.
MIN_TEMPERATURE = 1e-4
_MAX_WIDTHS = 8  # of vocabularies widened by adapters, whose noise is kept


class _NoToken(Exception):
    """A row from which no token can be chosen; the message is the sequence's error."""


class Sampler:
    """Samples, verifies drafts and takes logprobs for one model's vocabulary.

    Ids at or above `vocab_size`, or above that of a request whose adapters add tokens, are never
    chosen, though the logits may be wider (padded, or made for a neighbour with more tokens).
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._noise = Noise(vocab_size)
        self._wider_noise = functools.lru_cache(maxsize=_MAX_WIDTHS)(Noise)
        self._histories = penalties.Histories(vocab_size)

    def sample(
        self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor, executor: Executor
    ) -> StepResult:
        """The tokens that each span of `plan` produced, with the logprobs that it wants.

        `hidden`: [T, D], from `executor.forward(batch)`. Logits are made in slices of at most
        `MAX_LOGIT_ROWS` rows. A row that holds NaN ends its own sequence only.
        """
        results = [SpanResult() for _ in plan.spans]
        with np.errstate(all="ignore"):
            for group in _groups(plan):
                rows = np.concatenate([_sample_rows(batch, s) for s in group])
                logits = iter(self._logits(hidden, rows, executor))
                for s in group:
                    span = plan.spans[s]
                    width = self._width(span.sequence)
                    results[s] = self._guarded(
                        span, [next(logits)[:width] for _ in range(span.num_samples)]
                    )
            for s, span in enumerate(plan.spans):
                if span.wants_prompt_logprobs and results[s].error is None:
                    first_row = int(batch.query_start[s])
                    prompt = self._prompt_logprobs(span, first_row, hidden, executor)
                    results[s] = _with_prompt(results[s], prompt)
        return StepResult(spans=tuple(results))

    def _logits(self, hidden: torch.Tensor, rows: np.ndarray, executor: Executor) -> Floats:
        logits: Floats = executor.logits(hidden, rows).cpu().numpy()
        return logits

    def _width(self, seq: Sequence) -> int:
        """How many tokens `seq` may choose from; wider rows are cut to it."""
        return seq.request.vocab_size or self._vocab_size

    def _noise_of(self, width: int) -> Noise:
        """Noise of so many tokens; each token's is the same in all."""
        return self._noise if width == self._vocab_size else self._wider_noise(width)

    def _guarded(self, span: Span, rows: list[Floats]) -> SpanResult:
        try:
            return self._verify(span, rows)
        except _NoToken as error:
            return SpanResult(error=str(error))

    def _verify(self, span: Span, rows: list[Floats]) -> SpanResult:
        """Accept drafts while they equal the samples; rows behind a wrong draft mean nothing."""
        num_top = span.sequence.request.params.logprobs
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for i, row in enumerate(rows):
            token = self._choose(span.sequence, span.drafts[:i], row)
            tokens.append(token)
            if num_top is not None:
                logprobs.append(token_logprobs(row, token, num_top))
            if i < len(span.drafts) and token != span.drafts[i]:
                break
        return SpanResult(token_ids=tuple(tokens), logprobs=tuple(logprobs))

    def _choose(self, seq: Sequence, drafts: tuple[int, ...], row: Floats) -> int:
        """The token that follows `seq` and `drafts`."""
        params = seq.request.params
        if penalties.changes_logits(params, seq.num_output_tokens + len(drafts)):
            _check(row, int(row.argmax()))
            row = penalties.apply(row, seq, drafts, self._eos_token_ids, self._histories)
            best = int(row.argmax())
            if row[best] == -np.inf:
                raise _NoToken("allowed_token_ids and bad_words leave no token to choose")
        else:
            best = int(row.argmax())
            _check(row, best)
        if params.greedy:
            return best
        key = stream_key(seq.seed, seq.index, len(seq.tokens) + len(drafts))
        temperature = max(params.temperature, MIN_TEMPERATURE)
        noise = self._noise_of(len(row))
        ids = kept_tokens(row, temperature, params.top_k, params.top_p, params.min_p)
        if ids is None:
            return gumbel_argmax(noise, key, row, temperature)
        return int(ids[gumbel_argmax(noise, key, row[ids], temperature, ids)])

    def _prompt_logprobs(
        self, span: Span, first_row: int, hidden: torch.Tensor, executor: Executor
    ) -> tuple[TokenLogprobs, ...] | str:
        """Logprobs of prompt tokens start+1 … of the span, or an error.

        The row of the prompt's last token predicts the first output and does not count here.
        """
        prompt = span.sequence.request.prompt_token_ids
        num_top = span.sequence.request.params.prompt_logprobs or 0
        end = min(span.num_tokens, len(prompt) - 1 - span.start)
        width = self._width(span.sequence)
        found: list[TokenLogprobs] = []
        for begin in range(0, end, MAX_LOGIT_ROWS):
            offsets = np.arange(begin, min(begin + MAX_LOGIT_ROWS, end))
            logits = self._logits(hidden, first_row + offsets, executor)[:, :width]
            for offset, row in zip(offsets, logits, strict=True):
                token = prompt[span.start + int(offset) + 1]
                if not np.isfinite(row.max()):
                    return _NOT_FINITE
                found.append(token_logprobs(row, token, num_top))
        return tuple(found)


_NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


def _check(row: Floats, best: int) -> None:
    """Refuse a row whose best value is not finite: argmax finds NaN first."""
    if not np.isfinite(row[best]):
        raise _NoToken(_NOT_FINITE)


def _sample_rows(batch: StepBatch, s: int) -> np.ndarray:
    rows: np.ndarray = batch.sample_rows[batch.sample_start[s] : batch.sample_start[s + 1]]
    return rows


def _groups(plan: StepPlan) -> Iterator[list[int]]:
    """Runs of spans that sample, whole spans, of at most MAX_LOGIT_ROWS rows (or one span)."""
    group: list[int] = []
    num_rows = 0
    for s, span in enumerate(plan.spans):
        if not span.num_samples:
            continue
        if group and num_rows + span.num_samples > MAX_LOGIT_ROWS:
            yield group
            group, num_rows = [], 0
        group.append(s)
        num_rows += span.num_samples
    if group:
        yield group


def _with_prompt(result: SpanResult, prompt: tuple[TokenLogprobs, ...] | str) -> SpanResult:
    if isinstance(prompt, str):
        return SpanResult(error=prompt)
    return SpanResult(token_ids=result.token_ids, logprobs=result.logprobs, prompt_logprobs=prompt)
