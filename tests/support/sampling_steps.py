"""Sequences, plans and a synthetic model, to drive the sampler without an engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch

from plait.platform.batch import StepBatch
from plait.platform.core import (
    CompiledGrammar,
    Request,
    SamplingParams,
    Sequence,
    Span,
    StepPlan,
    StepResult,
)
from plait.platform.ops.likeliest import likeliest
from plait.platform.sampling import Sampler
from plait.platform.strand import RowMasks

PROMPT = (3, 1, 4, 1, 5)
LogitsOf = Callable[[tuple[int, ...]], np.ndarray]  # a history's logits, [V] fp32


def make_sequence(
    seq_id: int = 0,
    *,
    prompt: tuple[int, ...] = PROMPT,
    output: tuple[int, ...] = (),
    seed: int = 0,
    bad_words: tuple[tuple[int, ...], ...] = (),
    vocab_size: int | None = None,
    grammar: CompiledGrammar | None = None,
    **params: Any,
) -> Sequence:
    if bad_words:
        params["bad_words"] = [str(word) for word in bad_words]
    request = Request(
        request_id=f"r{seq_id}",
        prompt_token_ids=prompt,
        params=SamplingParams(**({"max_tokens": 1000} | params)),
        bad_word_token_ids=bad_words,
        vocab_size=vocab_size,
        grammar=grammar,
    )
    return Sequence(
        seq_id=seq_id, request=request, index=0, arrival=seq_id, tokens=[*prompt, *output],
        max_total_tokens=10_000, seed=seed,
    )  # fmt: skip


class Model:
    """An executor whose logits are a function of the history that ends at a row."""

    def __init__(self, logits_of: LogitsOf) -> None:
        self._logits_of = logits_of
        self.histories: list[tuple[int, ...]] = []  # of the step's rows
        self.num_rows_asked: list[int] = []

    def logits(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        self.num_rows_asked.append(len(rows))
        assert hidden.shape[0] == len(self.histories)
        return torch.from_numpy(np.stack([self._logits_of(self.histories[r]) for r in rows]))

    def likeliest(self, hidden: torch.Tensor, rows: np.ndarray, num_tokens: int) -> list[int]:
        return likeliest(self.logits(hidden, rows), num_tokens)


def run_step(
    sampler: Sampler, model: Model, spans: SequenceOf[Span], masks: RowMasks | None = None
) -> StepResult:
    """One step over `spans`, as the engine calls the sampler."""
    model.histories = []
    sample_rows: list[int] = []
    query_start, sample_start = [0], [0]
    for span in spans:
        tokens = (*span.sequence.tokens, *span.drafts)
        end = span.start + span.num_tokens
        model.histories += [tuple(tokens[: i + 1]) for i in range(span.start, end)]
        rows = len(model.histories)
        sample_rows += range(rows - span.num_samples, rows)
        query_start.append(rows)
        sample_start.append(len(sample_rows))
    none = np.zeros(0, np.int64)
    batch = StepBatch(
        token_ids=none, positions=none, query_start=np.array(query_start, np.int32),
        seq_lens=none, slot_mapping=(), block_tables=(),
        sample_rows=np.array(sample_rows, np.int64),
        sample_start=np.array(sample_start, np.int32),
        image_rows=none,
    )  # fmt: skip
    hidden = torch.zeros(len(model.histories), 1)
    plan = StepPlan(step_id=0, spans=tuple(spans))
    return sampler.sample(plan, batch, hidden, model, masks)


def decode_span(seq: Sequence, drafts: tuple[int, ...] = ()) -> Span:
    """The last token of `seq`, and drafts to verify."""
    return Span(
        sequence=seq,
        start=len(seq.tokens) - 1,
        num_tokens=1 + len(drafts),
        num_samples=1 + len(drafts),
        drafts=drafts,
    )
