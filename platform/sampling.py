"""Chooses tokens: from rows of logits to a `StepResult`.

For each row of a span the *target's own* sample is drawn, exactly as without drafts, as though
the drafts before it were already output; drafts are accepted while they equal it. The token
after them is then already right. So drafts can change neither text nor distribution, and every
option (penalties, masks, logprobs, …) works with them because there is one path for all.

What a grammar forbids goes first: penalties, bias and filters see a row in which it is impossible.
Logprobs are those of the row before that, as with `allowed_token_ids` and all other options: the
model's own, so that a constrained token shows how likely it was by itself. What a mask cannot hold
is vetoed once it is chosen; the token is forbidden then, and the row chosen from anew.

Rows are worked on one at a time: each is a long vector, and what a row gives cannot depend on
its neighbours. Where all rows are greedy, without further options, one call finds their tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plait.platform.core import (
    SamplingParams,
    Sequence,
    Span,
    SpanResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from plait.platform.errors import BadRequest, InternalError, InvalidAdapter
from plait.platform.logits import penalties
from plait.platform.logits.logprobs import token_logprobs
from plait.platform.logits.noise import Noise, stream_key
from plait.platform.logits.token_filters import kept_tokens
from plait.platform.ops.gumbel_argmax import gumbel_argmax

if TYPE_CHECKING:
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.executor import Head
    from plait.platform.strand import RowMasks, Veto

Floats = npt.NDArray[np.float32]

MAX_LOGIT_ROWS = 64  # made at a time: bounds the memory of logits, above all of prompt logprobs
# Lower temperatures act as this one: a logit ahead by 0.01 is then ahead by 100 nats.
MIN_TEMPERATURE = 1e-4
NOTHING_SAMPLED = SpanResult()
_MAX_WIDTHS = 8  # of vocabularies widened by adapters, whose noise is kept


class NoToken(Exception):
    """A row from which no token can be chosen; the message is the sequence's error."""

    def __init__(self, message: str, code: str = InternalError.code) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Row:
    """The logits of one sample row."""

    logits: Floats  # without what a grammar forbids
    raw: Floats  # as the model gave them; the same where no grammar forbids or nobody asks
    masked: bool = False
    veto: Veto | None = None  # forbids some tokens more


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
        self,
        plan: StepPlan,
        batch: StepBatch,
        hidden: torch.Tensor,
        executor: Head,
        masks: RowMasks | None = None,
    ) -> StepResult:
        """The tokens that each span of `plan` produced, with the logprobs that it wants.

        `hidden`: [T, D], from `executor.forward(batch)`. Logits are made in slices of at most
        `MAX_LOGIT_ROWS` rows. A row that holds NaN ends its own sequence only, and so does a mask
        that could not be made.
        """
        results = [NOTHING_SAMPLED] * len(plan.spans)
        faults = {} if masks is None else masks.wait()
        for group in _groups(plan):
            spans = [plan.spans[s] for s in group]
            first_row = int(batch.sample_start[group[0]])
            rows = batch.sample_rows[first_row : batch.sample_start[group[-1] + 1]]
            if masks is None and all(map(self._is_plain, spans)):
                made = _verified(spans, executor.likeliest(hidden, rows, self._vocab_size))
            else:
                logits = executor.logits(hidden, rows).cpu().numpy()
                made = self._one_by_one(spans, logits, masks, first_row)
            for s, result in zip(group, made, strict=True):
                fault = faults.get(s)
                results[s] = (
                    result
                    if fault is None
                    else SpanResult(error=fault.message, error_code=fault.code)
                )
        for s, span in enumerate(plan.spans):
            if span.wants_prompt_logprobs and results[s].error is None:
                first_row = int(batch.query_start[s])
                prompt = self._prompt_logprobs(span, first_row, hidden, executor)
                results[s] = _with_prompt(results[s], prompt)
        return StepResult(spans=tuple(map(_blamed, plan.spans, results)))

    def _is_plain(self, span: Span) -> bool:
        """Whether nothing but the likeliest token of each row is asked for."""
        request = span.sequence.request
        return (
            self.takes_likeliest(span.sequence)
            and request.params.logprobs is None
            and request.grammar is None
            and request.vocab_size is None
        )

    def _one_by_one(
        self,
        spans: SequenceOf[Span],
        logits: Floats,
        masks: RowMasks | None,
        first_row: int,
    ) -> list[SpanResult]:
        """The results of spans of which some ask for more; each row is worked on by itself."""
        with np.errstate(all="ignore"):
            rows = self._rows(spans, logits, masks, first_row)
            return [self._guarded(*each) for each in zip(spans, rows, strict=True)]

    def choose(
        self, seq: Sequence, drafts: tuple[int, ...], logits: Floats, *, masked: bool = False
    ) -> int | None:
        """What `sample` would choose after `seq` and `drafts` from another model's row.

        None where nothing can be chosen. `logits`: [V] of `seq`'s own vocabulary; `masked`: without
        what a grammar forbids.
        """
        with np.errstate(all="ignore"):
            try:
                return self._choose(seq, drafts, Row(logits=logits, raw=logits, masked=masked))
            except NoToken:
                return None

    def takes_likeliest(self, seq: Sequence) -> bool:
        """Whether `choose` gives the largest of each row behind `seq`, with no mask over it."""
        params = seq.request.params
        return params.greedy and not penalties.changes_logits(params, seq.num_output_tokens)

    def _rows(
        self,
        spans: SequenceOf[Span],
        logits: Floats,
        masks: RowMasks | None,
        first_row: int,
    ) -> Iterator[list[Row]]:
        """The rows of each span, masked; they are consecutive ones of `logits`."""
        raw: dict[int, Floats] = {}
        masked: SequenceOf[bool] = ()
        if masks is not None:
            masked = masks.masked(first_row, len(logits))
            raw = _mask(spans, logits, masks, masked, first_row)
        row = 0
        for span in spans:
            width = self._width(span.sequence)
            yield [
                Row(
                    logits=logits[r, :width],
                    raw=raw.get(r, logits[r])[:width],
                    masked=masks is not None and masked[r],
                    veto=masks.veto(first_row + r) if masks is not None and masked[r] else None,
                )
                for r in range(row, row + span.num_samples)
            ]
            row += span.num_samples

    def _width(self, seq: Sequence) -> int:
        """How many tokens `seq` may choose from; wider rows are cut to it."""
        return seq.request.vocab_size or self._vocab_size

    def _noise_of(self, width: int) -> Noise:
        """Noise of so many tokens; each token's is the same in all."""
        return self._noise if width == self._vocab_size else self._wider_noise(width)

    def _guarded(self, span: Span, rows: list[Row]) -> SpanResult:
        if span.sequence.request.grammar is not None and not rows[0].masked:
            return SpanResult(error="the grammar of this request was not enforced")
        try:
            return self._verify(span, rows)
        except NoToken as error:
            return SpanResult(error=str(error), error_code=error.code)

    def _verify(self, span: Span, rows: list[Row]) -> SpanResult:
        """Accept drafts while they equal the samples; rows behind a wrong draft mean nothing."""
        num_top = span.sequence.request.params.logprobs
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for i, row in enumerate(rows):
            token = self._choose(span.sequence, span.drafts[:i], row)
            tokens.append(token)
            if num_top is not None:
                logprobs.append(token_logprobs(row.raw, token, num_top))
            if i < len(span.drafts) and token != span.drafts[i]:
                break
        return SpanResult(token_ids=tuple(tokens), logprobs=tuple(logprobs))

    def _choose(self, seq: Sequence, drafts: tuple[int, ...], row: Row) -> int:
        """The token that follows `seq` and `drafts`."""
        params = seq.request.params
        logits, changed = self._changed(seq, drafts, row)
        while True:
            best = int(logits.argmax())
            if (changed or row.masked) and logits[best] == -np.inf:
                raise NoToken(_GRAMMAR_AND if row.masked else NOTHING_LEFT, BadRequest.code)
            check_finite(logits, best)
            position = len(seq.tokens) + len(drafts)
            token = best if params.greedy else self._draw(seq, position, logits)
            if row.veto is None or not row.veto(token):
                return token
            logits[token] = -np.inf

    def _changed(self, seq: Sequence, drafts: tuple[int, ...], row: Row) -> tuple[Floats, bool]:
        """Logits with penalties, bias and bans, and whether there are any."""
        if not penalties.changes_logits(seq.request.params, seq.num_output_tokens + len(drafts)):
            return row.logits, False
        if not row.masked:
            check_finite(row.logits, int(row.logits.argmax()))
        changed = penalties.apply(row.logits, seq, drafts, self._eos_token_ids, self._histories)
        return changed, True

    def _draw(self, seq: Sequence, position: int, row: Floats) -> int:
        """The sample at a position, from a row whose largest logit is finite."""
        key = stream_key(seq.seed, seq.index, position)
        temperature = max(seq.request.params.temperature, MIN_TEMPERATURE)
        noise = self._noise_of(len(row))
        values, ids = kept_values(row, temperature, seq.request.params)
        token = gumbel_argmax(noise, key, values, temperature, ids)
        return token if ids is None else int(ids[token])

    def _prompt_logprobs(
        self, span: Span, first_row: int, hidden: torch.Tensor, executor: Head
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
            logits = executor.logits(hidden, first_row + offsets).cpu().numpy()[:, :width]
            with np.errstate(all="ignore"):
                for offset, row in zip(offsets, logits, strict=True):
                    token = prompt[span.start + int(offset) + 1]
                    if not np.isfinite(row.max()):
                        return _NOT_FINITE
                    found.append(token_logprobs(row, token, num_top))
        return tuple(found)


def kept_values(
    row: Floats, temperature: float, params: SamplingParams
) -> tuple[Floats, npt.NDArray[np.int64] | None]:
    """The logits of the tokens that filters leave, and their ids, ascending; None: all tokens."""
    left = np.flatnonzero(row > -np.inf) if _is_sparse(row) else None
    values = row if left is None else row[left]
    ids = kept_tokens(values, temperature, params.top_k, params.top_p, params.min_p)
    if ids is not None:
        values = values[ids]
    if left is not None:
        ids = left if ids is None else left[ids]
    return values, ids


_NOT_FINITE = "the model's logits are not finite (NaN or infinity)"
_NOT_FINITE_WITH = (
    "the logits are not finite (NaN or infinity) with this request's adapter: it changes the model "
    "by more than its numbers hold"
)
NOTHING_LEFT = "allowed_token_ids and bad_words leave no token to choose"
_GRAMMAR_AND = (
    "the constraint on the answer's form, with allowed_token_ids, bad_words and the model's own "
    "limits, leaves no token to choose: leave out allowed_token_ids and bad_words"
)


def check_finite(row: Floats, best: int) -> None:
    """Refuse a row whose best value is not finite: argmax finds NaN first."""
    if not np.isfinite(row[best]):
        raise NoToken(_NOT_FINITE)


def _is_sparse(row: Floats) -> bool:
    """Whether choosing among the possible tokens alone is quicker."""
    return bool(8 * np.count_nonzero(row > -np.inf) < len(row))


def _mask(
    spans: SequenceOf[Span],
    logits: Floats,
    masks: RowMasks,
    masked: SequenceOf[bool],
    first_row: int,
) -> dict[int, Floats]:
    """Apply masks to rows of spans; returns copies from before where logprobs are wanted.

    A masked row that is not finite becomes NaN as a whole: the mask shall not hide it.
    """
    import torch

    wanting = (
        span.sequence.request.params.logprobs is not None
        for span in spans
        for _ in range(span.num_samples)
    )
    constrained = [(r, wants) for r, wants in enumerate(wanting) if masked[r]]
    broken = [r for r, _ in constrained if not np.isfinite(logits[r].max())]
    raw = {r: logits[r].copy() for r, wants in constrained if wants}
    masks.apply(torch.from_numpy(logits), first_row)
    logits[broken] = np.nan
    return raw


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


def _verified(spans: SequenceOf[Span], tokens: SequenceOf[int]) -> list[SpanResult]:
    """The results of plain spans, from the likeliest token of each of their rows; -1: no token."""
    results, row = [], 0
    for span in spans:
        end = row + 1
        for draft in span.drafts:
            if tokens[end - 1] != draft:
                break
            end += 1
        results.append(
            SpanResult(token_ids=tuple(tokens[row:end]))
            if tokens[end - 1] >= 0
            else SpanResult(error=_NOT_FINITE)
        )
        row += span.num_samples
    return results


def _blamed(span: Span, result: SpanResult) -> SpanResult:
    """The result, where an adapter may be at fault in place of the model."""
    if result.error != _NOT_FINITE or not span.sequence.request.adapters:
        return result
    return SpanResult(error=_NOT_FINITE_WITH, error_code=InvalidAdapter.code)


def _with_prompt(result: SpanResult, prompt: tuple[TokenLogprobs, ...] | str) -> SpanResult:
    if isinstance(prompt, str):
        return SpanResult(error=prompt)
    return SpanResult(token_ids=result.token_ids, logprobs=result.logprobs, prompt_logprobs=prompt)
