"""Rejection sampling: what comes out is distributed as the target would have drawn it."""

from __future__ import annotations

import numpy as np
import pytest

from plait.platform.logits.noise import Noise
from plait.speculative import rejection
from plait.speculative.rejection import Distribution, RejectionSampler

VOCAB = 10
NUM_DRAWS = 20_000
# Of 9 and of 90 degrees of freedom, exceeded by chance once in a hundred thousand times.
CRITICAL = {9: 38.9, 99: 173.0}


def distributions(num_rows: int, seed: int) -> np.ndarray:
    """Rows of probabilities over the vocabulary, none tiny."""
    rng = np.random.default_rng(seed)
    rows = rng.dirichlet(np.full(VOCAB, 0.5), num_rows) + 0.01
    return rows / rows.sum(axis=1, keepdims=True)


def of_rows(rows: np.ndarray) -> list[Distribution]:
    """Without the tokens that have none, as filters leave them."""
    return [Distribution(np.flatnonzero(row), row[row > 0]) for row in rows]


def runs(pi: np.ndarray, q: np.ndarray, num: int) -> list[tuple[int, ...]]:
    """The tokens at positions 3 and 4 of requests that differ by their seeds only.

    A step that ends early is followed by one from where it ended.
    """
    noise, results = Noise(VOCAB), []
    targets, sources = of_rows(pi), of_rows(q)
    for seed in range(num):
        sampler = RejectionSampler(noise, seed, index=1)
        tokens = sampler.verify(targets, sources, [sampler.draw(sources[0], 3)], position=3)
        if len(tokens) < len(pi):
            tokens += sampler.verify(targets[1:], sources[1:], [], position=4)
        results.append(tokens)
    return results


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_tokens_are_distributed_as_the_targets_alone_and_in_pairs() -> None:
    pi, q = distributions(2, 5), distributions(1, 6)
    counts = np.zeros((VOCAB, VOCAB))
    for tokens in runs(pi, q, NUM_DRAWS):
        counts[tokens] += 1
    for axis, row in ((1, pi[0]), (0, pi[1])):
        assert chi_square(counts.sum(axis=axis), row * NUM_DRAWS) < CRITICAL[9]
    assert chi_square(counts, np.outer(pi[0], pi[1]) * NUM_DRAWS) < CRITICAL[99]


@pytest.mark.parametrize(("salt", "seed"), [("_ACCEPT", 1), ("_RESIDUAL", 3)])
def test_shared_noise_would_be_found(monkeypatch: pytest.MonkeyPatch, salt: str, seed: int) -> None:
    monkeypatch.setattr(rejection, salt, rejection._DRAFT)
    rng, num = np.random.default_rng(seed), 5000
    pi, q = (rng.dirichlet(np.full(VOCAB, 0.5), 2) + 0.01 for _ in range(2))
    pi, q = pi / pi.sum(axis=1, keepdims=True), q[:1] / q[:1].sum()
    counts = np.bincount([tokens[0] for tokens in runs(pi, q, num)], minlength=VOCAB)
    assert chi_square(counts, pi[0] * num) > CRITICAL[9]


def test_acceptance_is_one_less_the_distance() -> None:
    pi, q, noise = distributions(2, 3), distributions(1, 4), Noise(VOCAB)
    num_accepted, num = 0, 4000
    for seed in range(num):
        sampler = RejectionSampler(noise, seed, 0)
        (source,) = of_rows(q)
        drafts = [sampler.draw(source, 0)]
        num_accepted += len(sampler.verify(of_rows(pi), [source], drafts, 0)) == 2
    assert num_accepted / num == pytest.approx(np.minimum(pi[0], q[0]).sum(), abs=0.03)


def test_drafts_that_the_target_forbids_are_never_accepted() -> None:
    pi, q = of_rows(np.eye(VOCAB)[[3, 4]]), of_rows(np.eye(VOCAB)[[5]])
    sampler = RejectionSampler(Noise(VOCAB), 1, 0)
    assert sampler.verify(pi, q, [sampler.draw(q[0], 0)], 0) == (3,)
    assert sampler.verify(pi, pi[:1], [3], 0) == (3, 4)


def test_only_as_many_targets_are_made_as_drafts_hold() -> None:
    pi, q = of_rows(np.eye(VOCAB)[[3, 4, 5]]), of_rows(np.eye(VOCAB)[[3, 6]])
    targets = iter(pi)
    assert RejectionSampler(Noise(VOCAB), 1, 0).verify(targets, q, [3, 6], 0) == (3, 4)
    assert next(targets) is pi[2]
