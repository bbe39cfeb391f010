"""Rows that a grammar constrains: every option sees a row without what is forbidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.sampling_steps import Model, decode_span, make_sequence, run_step

from plait.platform.core import CompiledGrammar, Span, SpanResult
from plait.platform.errors import GrammarFault, PlaitError
from plait.platform.sampling import MAX_LOGIT_ROWS, Sampler

VOCAB = 97
EOS = (2, 96)
GRAMMAR = CompiledGrammar(key="", backend="", payload=b"", num_bytes=0)
ALLOWED = [2, 5, 7, 11, 40, 41, 42, 90]

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5, "temperature": 0.8},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {5: 4.0, 6: 100.0, 90: -20.0}},
    {"min_tokens": 60, "temperature": 1.2},
    {"bad_words": ((7,), (11, 40)), "temperature": 1.2},
    {"stop_token_ids": (5,), "min_tokens": 60},
)


def logits_of(history: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([len(history), *history[-3:]])
    return (rng.standard_normal(VOCAB) * 2).astype(np.float32)


class Allow:
    """Masks by lists of tokens, one per sample row of the step; None: unconstrained."""

    def __init__(
        self, rows: Sequence[Sequence[int] | None], faults: Mapping[int, PlaitError] | None = None
    ) -> None:
        self._rows = rows
        self._faults = faults or {}

    def wait(self) -> Mapping[int, PlaitError]:
        return self._faults

    def masked(self, first_row: int, num_rows: int) -> list[bool]:
        return [row is not None for row in self._rows[first_row : first_row + num_rows]]

    def veto(self, row: int) -> None:
        return None

    def apply(self, logits: torch.Tensor, first_row: int) -> None:
        for row, allowed in zip(logits, self._rows[first_row:], strict=False):
            if allowed is not None:
                kept = row[list(allowed)].clone()
                row.fill_(-torch.inf)
                row[list(allowed)] = kept


def steps(params: dict[str, Any], allowed: Sequence[int] | None, drafts: bool) -> list[Any]:
    """Twenty tokens of a sequence, with a draft for each or none."""
    seq = make_sequence(seed=3, grammar=GRAMMAR if allowed else None, **params)
    sampler, model = Sampler(VOCAB, EOS), Model(logits_of)
    found: list[Any] = []
    while len(found) < 20:
        guess = ALLOWED[len(seq.tokens) % len(ALLOWED)]
        span = decode_span(seq, (guess,) if drafts else ())
        masks = Allow([allowed] * span.num_samples) if allowed else None
        (result,) = run_step(sampler, model, [span], masks).spans
        assert result.error is None
        seq.tokens.extend(result.token_ids)
        found += zip(result.token_ids, result.logprobs or result.token_ids, strict=True)
    return found[:20]


@pytest.mark.parametrize("params", OPTIONS, ids=str)
def test_a_mask_is_as_allowed_token_ids(params: dict[str, Any]) -> None:
    """The oracle: the same tokens allowed by the request itself, logprobs and all."""
    params = params | {"logprobs": 3}
    listed = steps(params | {"allowed_token_ids": ALLOWED}, None, drafts=False)
    assert steps(params, ALLOWED, drafts=False) == listed
    assert steps(params, ALLOWED, drafts=True) == listed
    assert {token for token, _ in listed} <= set(ALLOWED)


def test_each_draft_position_has_its_own_mask() -> None:
    seq = make_sequence(temperature=0, grammar=GRAMMAR)
    span = decode_span(seq, (11, 12, 13))
    masks = Allow([[11], [12], [14], [15]])
    (result,) = run_step(Sampler(VOCAB, EOS), Model(logits_of), [span], masks).spans
    assert result.token_ids == (11, 12, 14)


def test_masks_reach_their_rows_across_slices_of_logits() -> None:
    """More rows than are made at a time, some free, some of prompts without samples."""
    seqs = [
        make_sequence(i, temperature=0, grammar=GRAMMAR if i % 3 else None)
        for i in range(MAX_LOGIT_ROWS)
    ]
    spans = [decode_span(seq, (i % 50,)) for i, seq in enumerate(seqs)]
    spans.insert(5, Span(sequence=make_sequence(99), start=0, num_tokens=3, num_samples=0))
    rows: list[Any] = []
    for i in range(MAX_LOGIT_ROWS):
        rows += [[i % 50], [i + 1]] if i % 3 else [None, None]
    results = list(run_step(Sampler(VOCAB, EOS), Model(logits_of), spans, Allow(rows)).spans)
    assert results.pop(5) == SpanResult()
    for i, (seq, result) in enumerate(zip(seqs, results, strict=True)):
        if i % 3:
            assert result.token_ids == (i % 50, i + 1)
        else:
            assert result.token_ids[0] == int(logits_of(tuple(seq.tokens)).argmax())


def test_faults_and_rows_without_a_choice_end_only_their_sequence() -> None:
    def broken(history: tuple[int, ...]) -> np.ndarray:
        row = logits_of(history)
        if history[0] == 50:
            row[60] = np.nan  # where the mask would hide it
        return row

    options: list[dict[str, Any]] = [{}, {}, {"allowed_token_ids": [3]}, {}, {}]
    prompts = [(51,), (52,), (53,), (50,), (54,)]
    seqs = [
        make_sequence(i, prompt=prompt, grammar=GRAMMAR, temperature=0, **params)
        for i, (prompt, params) in enumerate(zip(prompts, options, strict=True))
    ]
    masks = Allow([ALLOWED, ALLOWED, ALLOWED, ALLOWED, None], {1: GrammarFault("it broke")})
    results = run_step(
        Sampler(VOCAB, EOS), Model(broken), [decode_span(seq) for seq in seqs], masks
    ).spans
    assert results[0].token_ids[0] in ALLOWED
    assert (results[1].error, results[1].error_code) == ("it broke", "grammar_internal_error")
    assert results[2].error_code == "invalid_value"
    assert "allowed_token_ids" in (results[2].error or "")
    assert "not finite" in (results[3].error or "")
    assert "not enforced" in (results[4].error or "")
    assert all(not result.token_ids for result in results[1:])


def test_min_tokens_leaves_an_end_where_nothing_else_may_follow() -> None:
    seq = make_sequence(temperature=0, grammar=GRAMMAR, min_tokens=9)
    (result,) = run_step(
        Sampler(VOCAB, EOS), Model(logits_of), [decode_span(seq)], Allow([list(EOS)])
    ).spans
    assert result.token_ids[0] in EOS
