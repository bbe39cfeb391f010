"""Sampling: distributions, filters and penalties against oracles; drafts, batches and faults."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling_steps import PROMPT, Model, decode_span, make_sequence, run_step

from plait.platform.core import AdapterUse, Sequence, Span, SpanResult
from plait.platform.logits.token_filters import kept_tokens, largest, nucleus
from plait.platform.sampling import MAX_LOGIT_ROWS, Sampler

VOCAB = 97
EOS = (2, 96)


def random_logits(history: tuple[int, ...], *, size: int = VOCAB, scale: float = 2.0) -> np.ndarray:
    """A fixed pseudo-random function of the last three tokens and the length."""
    rng = np.random.default_rng([len(history), *history[-3:]])
    return (rng.standard_normal(size) * scale).astype(np.float32)


def generate(seqs: list[Sequence], num_steps: int, draft: Any = None) -> list[list[SpanResult]]:
    """Decode all `seqs` together; returns what each step gave each."""
    sampler, model = Sampler(VOCAB, EOS), Model(random_logits)
    results: list[list[SpanResult]] = [[] for _ in seqs]
    for step in range(num_steps):
        drafts = [draft(seq, step) if draft else () for seq in seqs]
        spans = [decode_span(seq, d) for seq, d in zip(seqs, drafts, strict=True)]
        for i, result in enumerate(run_step(sampler, model, spans).spans):
            results[i].append(result)
            assert result.error is None
            seqs[i].tokens.extend(result.token_ids)
    return results


# --- distributions -----------------------------------------------------------------------------


def filtered(logits: np.ndarray, **p: Any) -> np.ndarray:
    """Oracle: probabilities in fp64, by sorting, straight from the definitions."""
    scaled = logits.astype(np.float64) / p.get("temperature", 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if "min_p" in p:
        probs[probs < p["min_p"] * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if "top_k" in p:
        probs[order[p["top_k"] :]] = 0
    probs /= probs.sum()
    if "top_p" in p:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= p["top_p"]]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 7, "top_p": 0.7, "min_p": 0.02},
    ],
    ids=str,
)
def test_samples_follow_the_distribution(params: dict[str, Any]) -> None:
    logits = np.array([0.3, 2.0, -1.0, 1.1, 0.0, 1.6, -0.4, 0.9, 0.5, -3.0], np.float32)
    probs = filtered(logits, **params)
    num = 10_000
    model, sampler = Model(lambda history: logits), Sampler(10, ())
    counts = np.zeros(10)
    for i in range(0, num, 100):
        # half of the draws over seeds, half over positions
        seeds = range(i, i + 100) if i % 200 else [i] * 100
        outputs = [()] * 100 if i % 200 else [(1,) * n for n in range(100)]
        seqs = [
            make_sequence(n, seed=seed, output=output, **params)
            for n, (seed, output) in enumerate(zip(seeds, outputs, strict=True))
        ]
        for result in run_step(sampler, model, [decode_span(s) for s in seqs]).spans:
            counts[result.token_ids[0]] += 1
    assert not counts[probs == 0].any()
    kept = probs > 0
    chi2 = ((counts[kept] - num * probs[kept]) ** 2 / (num * probs[kept])).sum()
    freedom = kept.sum() - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1, 7, 97, 3001])
@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_k": 40}, {"top_p": 0.05}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_p": 1.0},
     {"top_k": 30, "top_p": 0.5, "min_p": 0.01, "temperature": 0.7},
     {"top_p": 0.999, "temperature": 1.9}],
    ids=str,
)  # fmt: skip
def test_the_kept_tokens_are_those_of_transformers(size: int, params: dict[str, Any]) -> None:
    from transformers import generation

    warpers: list[Any] = [
        generation.TemperatureLogitsWarper(float(params.get("temperature", 1.0))),
    ]
    if "min_p" in params:
        warpers.append(generation.MinPLogitsWarper(params["min_p"]))
    if "top_k" in params:
        warpers.append(generation.TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(generation.TopPLogitsWarper(params["top_p"]))
    for history in range(5):
        logits = random_logits((history, 9), size=size)
        scores = torch.from_numpy(logits)[None].double()
        for warper in warpers:
            scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
        expected = torch.nonzero(scores[0] > -math.inf)[:, 0].tolist()
        ids = kept_tokens(
            logits, params.get("temperature", 1.0), params.get("top_k", 0),
            params.get("top_p", 1.0), params.get("min_p", 0.0),
        )  # fmt: skip
        assert (list(range(size)) if ids is None else ids.tolist()) == expected


# --- filters -----------------------------------------------------------------------------------

# Few distinct values make ties; wide ranges reach the bins' end.
rows = st.lists(
    st.sampled_from([0.0, 1.0, 1.5, -3.0, 20.0, -1e4, -math.inf]) | st.floats(-30, 30, width=32),
    min_size=1, max_size=400,
).filter(lambda row: max(row) > -math.inf)  # fmt: skip


@given(rows, st.integers(1, 500))
@settings(max_examples=200, deadline=None)
def test_largest_orders_by_value_then_id(row: list[float], k: int) -> None:
    values = np.array(row, np.float32)
    expected = sorted(range(len(row)), key=lambda i: (-values[i], i))[:k]
    assert largest(values, k).tolist() == expected


def test_largest_of_many_values_with_ties() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 300, 20_011).astype(np.float32)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    for k in (1, 5, 64, 78, 79, 500, 20_011, 30_000):
        assert largest(values, k).tolist() == order[:k]


@given(rows, st.floats(0.001, 0.9999), st.sampled_from([0.01, 0.5, 1.0, 4.0]))
@settings(max_examples=250, deadline=None)
def test_sorting_and_counting_cut_top_p_alike(row: list[float], p: float, temp: float) -> None:
    logits = np.array(row, np.float32)
    with np.errstate(all="ignore"):
        by_bins = nucleus(logits, temp, p, num_sorted=len(logits))
        for num_sorted in (1, 3, len(logits) - 1):
            if num_sorted > 0:
                assert nucleus(logits, temp, p, num_sorted=num_sorted).tolist() == by_bins.tolist()
    assert len(by_bins)
    # every kept token is at least as good as every token left out; of equal ones ids are lowest
    left = sorted(set(range(len(row))) - set(by_bins.tolist()))
    if left:
        assert min((logits[i], -i) for i in by_bins) > max((logits[i], -i) for i in left)


# --- greedy, penalties, bans -------------------------------------------------------------------


def next_token(logits: Any, seq: Sequence) -> SpanResult:
    row = np.array(logits, np.float32)
    return run_step(Sampler(len(row), (0,)), Model(lambda h: row), [decode_span(seq)]).spans[0]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert next_token([0, 5, 1, 5], make_sequence(temperature=0)).token_ids == (1,)


def test_penalties_equal_their_formulas() -> None:
    """Greedy tokens against an oracle over many random histories."""
    rng = np.random.default_rng(5)
    for trial in range(60):
        p = {
            "repetition_penalty": float(rng.uniform(0.6, 2)),
            "presence_penalty": float(rng.uniform(-2, 2)),
            "frequency_penalty": float(rng.uniform(-2, 2)),
            "logit_bias": {int(t): float(rng.uniform(-3, 3)) for t in rng.integers(0, 40, 4)},
        }
        prompt = tuple(map(int, rng.integers(0, 40, 6)))
        output = tuple(map(int, rng.integers(0, 40, trial)))
        logits = rng.standard_normal(40).astype(np.float32) * 3
        want = logits.astype(np.float64)
        for token, bias in p["logit_bias"].items():
            want[token] += bias
        for token in {*prompt, *output}:
            r = p["repetition_penalty"]
            want[token] = want[token] / r if want[token] > 0 else want[token] * r
        for token in set(output):
            want[token] -= p["frequency_penalty"] * output.count(token) + p["presence_penalty"]
        seq = make_sequence(prompt=prompt, output=output, temperature=0, **p)
        assert next_token(logits, seq).token_ids == (int(want.argmax()),)


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import generation

    logits = random_logits((1,))
    history = torch.tensor([[*PROMPT, 7, 7, 9]])
    scores = generation.RepetitionPenaltyLogitsProcessor(1.7)(
        history, torch.from_numpy(logits)[None]
    )
    seq = make_sequence(output=(7, 7, 9), temperature=0, repetition_penalty=1.7, logprobs=0)
    assert next_token(logits, seq).token_ids == (int(scores.argmax()),)


def test_a_sequence_never_inherits_the_history_of_another() -> None:
    sampler = Sampler(4, ())
    model = Model(lambda history: np.array([2.0, 1.9, 0, 0], np.float32))
    for output, token in (((0,), 1), ((3,), 0), ((0, 0), 1)):
        seq = make_sequence(7, prompt=(2,), output=output, temperature=0, presence_penalty=1.0)
        assert run_step(sampler, model, [decode_span(seq)]).spans[0].token_ids == (token,)


@pytest.mark.parametrize(
    ("output", "token"), [((), 1), ((2,), 2), ((3,), 0), ((2, 3), 0), ((3, 2), 2)]
)
def test_bad_words_ban_the_token_that_would_complete_them(
    output: tuple[int, ...], token: int
) -> None:
    logits = [8, 10, 9, 7.0]  # 1 best, then 2, then 0
    words = ((2, 1), (3, 1), (3, 2))
    seq = make_sequence(prompt=(3, 2), output=output, temperature=0, bad_words=words)
    assert next_token(logits, seq).token_ids == (token,)


def test_end_and_stop_tokens_wait_for_min_tokens() -> None:
    logits = [10.0, 9, 8, 7]  # 0 is the end token
    p = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [1]}
    assert next_token(logits, make_sequence(output=(3,), **p)).token_ids == (2,)
    assert next_token(logits, make_sequence(output=(3, 3), **p)).token_ids == (0,)
    p["ignore_eos"] = True  # the end token ends nothing then, so that nothing forbids it
    assert next_token(logits, make_sequence(output=(3,), **p)).token_ids == (0,)


def test_min_tokens_gives_way_where_nothing_else_is_allowed() -> None:
    seq = make_sequence(temperature=0, min_tokens=5, allowed_token_ids=[0])
    assert next_token([1.0, 2, 3], seq).token_ids == (0,)


def test_only_allowed_tokens_are_chosen_and_none_left_is_an_error() -> None:
    logits = [9.0, 8, 7, 6]
    assert next_token(logits, make_sequence(temperature=0, allowed_token_ids=[2, 3])).token_ids == (
        2,
    )
    result = next_token(logits, make_sequence(allowed_token_ids=[2], bad_words=((2,),)))
    assert result.token_ids == ()
    assert "allowed_token_ids" in str(result.error)


# --- drafts ------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "filters": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "top_p": {"top_p": 0.5},
    # few tokens to choose from, so that most of them have been output before
    "repetition": {"temperature": 0, "repetition_penalty": 1.5, "allowed_token_ids": range(6)},
    "counts": {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.9,
        "allowed_token_ids": range(6),
        "temperature": 0.5,
    },
    "min_tokens": {
        "min_tokens": 9,
        "stop_token_ids": [*range(10, 60)],
        "temperature": 0.5,
        "logit_bias": {3: 0.5},
    },
    "bad_words": {"bad_words": tuple((a, b) for a in range(0, VOCAB, 2) for b in range(0, 50, 3))},
    "allowed": {"allowed_token_ids": [*range(5, 25)], "logit_bias": {7: 2.0}},
    "logprobs": {"logprobs": 3, "temperature": 0.5},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_drafts_change_nothing(option: str) -> None:
    seqs = [make_sequence(i, seed=100 + i, **OPTIONS[option]) for i in range(3)]
    plain = generate(seqs, 24)
    outputs = [seq.output_token_ids for seq in seqs]
    rng = np.random.default_rng(1)
    accepted = []

    def draft(seq: Sequence, step: int) -> tuple[int, ...]:
        """Some right tokens of the answer, perhaps a wrong one, perhaps right ones behind it."""
        known = outputs[seq.seq_id][seq.num_output_tokens :][: rng.integers(0, 5)]
        wrong = [int(rng.integers(0, VOCAB))] if rng.random() < 0.5 else []
        return (*known, *wrong, *known[:1])

    drafted_seqs = [make_sequence(i, seed=100 + i, **OPTIONS[option]) for i in range(3)]
    drafted = generate(drafted_seqs, 12, draft)
    for i, seq in enumerate(drafted_seqs):
        num = min(24, seq.num_output_tokens)
        assert seq.output_token_ids[:num] == outputs[i][:num]
        logprobs = [lp for result in drafted[i] for lp in result.logprobs][:num]
        assert logprobs == [lp for result in plain[i] for lp in result.logprobs][: len(logprobs)]
        assert len(logprobs) == (num if "logprobs" in OPTIONS[option] else 0)
        assert all(len(r.token_ids) >= 1 for r in drafted[i])
        accepted += [len(r.token_ids) - 1 for r in drafted[i]]
    assert max(accepted) >= 3  # or the test would show nothing


def test_acceptance_stops_at_the_first_wrong_draft() -> None:
    seq = make_sequence(temperature=0)
    model = Model(lambda history: np.eye(9, dtype=np.float32)[len(history) % 9])
    right = tuple((len(PROMPT) + i) % 9 for i in range(4))
    sampler = Sampler(9, ())

    def verify(drafts: tuple[int, ...]) -> tuple[int, ...]:
        return run_step(sampler, model, [decode_span(seq, drafts)]).spans[0].token_ids

    assert verify(right[:3]) == right
    assert verify((right[0], 0, right[2])) == right[:2]
    assert verify((0, *right[1:3])) == right[:1]


# --- batches and faults ------------------------------------------------------------------------


def test_a_row_gives_the_same_alone_and_in_any_batch() -> None:
    def fresh() -> list[Sequence]:
        return [make_sequence(i, seed=i, **p) for i, p in enumerate(OPTIONS.values())]

    together = fresh()
    results = generate(together, 6)
    for i, alone in enumerate(fresh()):
        assert generate([alone], 6)[0] == results[i]
        assert alone.tokens == together[i].tokens
    backwards = fresh()[::-1]
    generate(backwards, 6)
    assert [seq.tokens for seq in backwards[::-1]] == [seq.tokens for seq in together]


def test_seed_index_and_position_each_change_the_noise() -> None:
    flat = Model(lambda history: np.zeros(5000, np.float32))
    sampler = Sampler(5000, ())

    def token(seq: Sequence, index: int = 0) -> int:
        seq.index = index
        return run_step(sampler, flat, [decode_span(seq)]).spans[0].token_ids[0]

    base = token(make_sequence(seed=1))
    assert base == token(make_sequence(seed=1, temperature=0.5, repetition_penalty=1.1))
    assert base != token(make_sequence(seed=2))
    assert base != token(make_sequence(seed=1), index=1)
    assert base != token(make_sequence(seed=1, output=(1,)))


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 5, "logprobs": 2}]
)
def test_padding_of_the_vocabulary_is_never_chosen(params: dict[str, Any]) -> None:
    logits = random_logits((0,), size=131)
    logits[101:] = 1e4
    sampler = Sampler(101, ())
    spans = [decode_span(make_sequence(i, seed=i, **params)) for i in range(30)]
    result = run_step(sampler, Model(lambda history: logits), spans)
    assert all(span.token_ids[0] < 101 for span in result.spans)
    assert all(i < 101 for s in result.spans for lp in s.logprobs for i, _ in lp.top)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"logprobs": 1}, {"prompt_logprobs": 1}])
def test_a_row_that_is_not_finite_is_the_adapters_fault_where_there_is_one(params: Any) -> None:
    def logits(_history: tuple[int, ...]) -> np.ndarray:
        return np.full(VOCAB, math.nan, np.float32)

    plain, adapted = make_sequence(0, **params), make_sequence(1, **params)
    uses = (AdapterUse(generation="a" * 64),)
    adapted.request = replace(adapted.request, adapters=uses)
    spans = [decode_span(plain), decode_span(adapted)]
    model, other = run_step(Sampler(VOCAB, EOS), Model(logits), spans).spans
    assert (model.error_code, other.error_code) == ("internal_error", "invalid_lora_adapter")
    assert "adapter" in str(other.error)
    assert "adapter" not in str(model.error)


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"repetition_penalty": 1.2}, {"logprobs": 1}]
)
def test_a_row_that_is_not_finite_ends_only_its_own_sequence(bad: Any, params: Any) -> None:
    def logits(history: tuple[int, ...]) -> np.ndarray:
        row = random_logits(history)
        if history[0] == 99:
            row[40 if bad != "all -inf" else slice(None)] = -math.inf if bad == "all -inf" else bad
        return row

    seqs = [make_sequence(0, **params), make_sequence(1, prompt=(99, 1), **params),
            make_sequence(2, **params)]  # fmt: skip
    sampler, model = Sampler(VOCAB, EOS), Model(logits)
    good, broken, last = run_step(sampler, model, [decode_span(seq) for seq in seqs]).spans
    assert "not finite" in str(broken.error)
    assert broken.token_ids == ()
    assert len(good.token_ids) == len(last.token_ids) == 1
    assert good.error is None


def test_masked_tokens_are_never_sampled() -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[[3, 30]] = 1
    sampler, model = Sampler(50, ()), Model(lambda history: logits)
    for params in ({}, {"top_p": 0.99}, {"top_k": 10}, {"min_p": 0.5}, {"temperature": 50}):
        seqs = [make_sequence(i, seed=i, **params) for i in range(50)]
        tokens = {r.token_ids[0] for r in run_step(sampler, model, spans_of(seqs)).spans}
        assert tokens == {3, 30}


def spans_of(seqs: list[Sequence]) -> list[Span]:
    return [decode_span(seq) for seq in seqs]


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e-3])
def test_very_low_temperatures_are_greedy_in_effect(temperature: float) -> None:
    logits = random_logits((8,))
    for seed in range(20):
        seq = make_sequence(seed=seed, temperature=temperature, top_p=0.9)
        assert next_token(logits, seq).token_ids == (int(logits.argmax()),)


# --- logprobs ----------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits((4,))
    seq = make_sequence(logprobs=6, temperature=0.2, top_k=2, logit_bias={50: 100.0})
    (entry,) = next_token(logits, seq).logprobs
    want = torch.log_softmax(torch.from_numpy(logits).double(), 0)
    order = torch.argsort(want, descending=True).tolist()
    assert entry.token_id == 50
    assert entry.rank == order.index(50) + 1
    assert entry.logprob == pytest.approx(want[50].item(), abs=1e-6)
    assert [token for token, _ in entry.top] == order[:6]
    assert [p for _, p in entry.top] == pytest.approx(want[order[:6]].tolist(), abs=1e-6)


def test_logprobs_of_zero_give_the_chosen_token_alone() -> None:
    (entry,) = next_token([1.0, 3, 3], make_sequence(logprobs=0, temperature=0)).logprobs
    assert (entry.token_id, entry.rank, entry.top) == (1, 1, ())
    second = make_sequence(logprobs=0, temperature=0, logit_bias={2: 1.0})
    assert next_token([1.0, 3, 3], second).logprobs[0].rank == 2  # behind the equal lower id


@pytest.mark.parametrize("chunk", [1, 3, 70, 200])
def test_prompt_logprobs_come_whole_over_any_chunks(chunk: int) -> None:
    rng = np.random.default_rng(0)
    prompt = tuple(map(int, rng.integers(0, VOCAB, 150)))
    seq = make_sequence(prompt=prompt, prompt_logprobs=2, temperature=0)
    sampler, model = Sampler(VOCAB, EOS), Model(random_logits)
    found = []
    for start in range(0, len(prompt), chunk):
        num = min(chunk, len(prompt) - start)
        span = Span(sequence=seq, start=start, num_tokens=num, wants_prompt_logprobs=True,
                    num_samples=int(start + num == len(prompt)))  # fmt: skip
        (result,) = run_step(sampler, model, [span]).spans
        assert len(result.token_ids) == span.num_samples
        found += result.prompt_logprobs
    assert [entry.token_id for entry in found] == list(prompt[1:])
    for i, entry in enumerate(found):
        want = torch.log_softmax(torch.from_numpy(random_logits(prompt[: i + 1])).double(), 0)
        assert entry.logprob == pytest.approx(want[prompt[i + 1]].item(), abs=1e-6)
    assert max(model.num_rows_asked) <= MAX_LOGIT_ROWS


def test_logits_are_made_for_bounded_numbers_of_rows() -> None:
    sampler, model = Sampler(VOCAB, EOS), Model(random_logits)
    seqs = [make_sequence(i, seed=i) for i in range(150)]
    spans = [decode_span(seq, (1, 2, 3)[: i % 4]) for i, seq in enumerate(seqs)]
    result = run_step(sampler, model, spans)
    assert max(model.num_rows_asked) <= MAX_LOGIT_ROWS
    assert sum(model.num_rows_asked) == sum(span.num_samples for span in spans)
    alone = [run_step(sampler, model, [span]).spans[0] for span in spans]
    assert list(result.spans) == alone


def test_a_step_without_samples_asks_for_no_logits() -> None:
    sampler, model = Sampler(VOCAB, EOS), Model(random_logits)
    span = Span(sequence=make_sequence(), start=0, num_tokens=3, num_samples=0)
    assert run_step(sampler, model, [span]).spans == (SpanResult(),)
    assert model.num_rows_asked == []
