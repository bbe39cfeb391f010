"""Requests whose adapters add tokens choose among more tokens than their neighbours."""

from typing import Any

import numpy as np
import pytest
from support.sampling_steps import Model, decode_span, make_sequence, run_step

from plait.platform.core import Sequence, Span
from plait.platform.sampling import Sampler

VOCAB, WIDE = 3000, 3005  # both beyond the size up to which noise is made for all tokens
ADDED = (99, 1)  # prompt of a request with added tokens
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"top_p": 0.9},
    {"top_k": 20, "temperature": 1.4},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"min_p": 0.05, "logprobs": 4},
)


def wide_logits(history: tuple[int, ...]) -> np.ndarray:
    """Where the request adds tokens they are the likeliest; else what an executor puts there."""
    row = np.random.default_rng(abs(hash(history))).standard_normal(WIDE).astype(np.float32)
    row[VOCAB:] = 20.0 if history[0] == ADDED[0] else -np.inf
    return row


def narrow_logits(history: tuple[int, ...]) -> np.ndarray:
    return wide_logits(history)[:VOCAB]


def sequences(params: dict[str, Any]) -> list[Sequence]:
    return [make_sequence(i, seed=i, output=(4, 7) * i, **params) for i in range(4)]


def spans(seqs: list[Sequence]) -> list[Span]:
    return [decode_span(seq) for seq in seqs]


@pytest.mark.parametrize("params", OPTIONS, ids=str)
def test_a_neighbour_with_added_tokens_changes_nothing(params: dict[str, Any]) -> None:
    seqs = sequences(params)
    alone = run_step(Sampler(VOCAB, ()), Model(narrow_logits), spans(seqs)).spans
    wide = make_sequence(9, prompt=ADDED, vocab_size=WIDE, **params)
    beside = run_step(Sampler(VOCAB, ()), Model(wide_logits), spans([*seqs, wide])).spans
    assert beside[:-1] == alone
    assert beside[-1].token_ids[0] >= VOCAB
    assert all(0 <= span.token_ids[0] < VOCAB for span in alone)


def test_tokens_beyond_a_requests_own_are_never_chosen_whatever_their_logits() -> None:
    def logits(history: tuple[int, ...]) -> np.ndarray:
        del history
        return np.arange(WIDE, dtype=np.float32)

    for vocab_size, last in ((None, VOCAB - 1), (VOCAB + 2, VOCAB + 1), (WIDE, WIDE - 1)):
        seq = make_sequence(vocab_size=vocab_size, temperature=0, logprobs=2)
        result = run_step(Sampler(VOCAB, ()), Model(logits), [decode_span(seq)]).spans[0]
        assert result.token_ids == (last,)
        assert [token for token, _ in result.logprobs[0].top] == [last, last - 1]


def test_prompt_logprobs_and_penalties_know_added_tokens() -> None:
    prompt = (99, VOCAB + 4, 5, VOCAB + 4)
    seq = make_sequence(
        prompt=prompt,
        vocab_size=WIDE,
        temperature=0,
        repetition_penalty=30.0,
        prompt_logprobs=1,
        logprobs=0,
    )
    span = Span(sequence=seq, start=0, num_tokens=4, num_samples=1, wants_prompt_logprobs=True)
    result = run_step(Sampler(VOCAB, ()), Model(wide_logits), [span]).spans[0]
    assert result.prompt_logprobs[0].token_id == VOCAB + 4
    assert result.prompt_logprobs[0].rank == 5  # of five equal ones the last
    assert result.token_ids == (VOCAB,)  # the repeated one is damped, and no other
