"""A model of ten tokens, whose rows are looked up by place and last token, and its exact answers.

The reference knows nothing of how Plait samples: it applies what a request says to a row by the
definition, and sums over all continuations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from support.history_executor import HistoryExecutor

from plait.platform.batch import StepBatch
from plait.platform.config import EngineConfig
from plait.platform.core import SamplingParams

NUM_TOKENS = 10
NUM_PLACES = 8  # positions repeat behind them


def ten_tokens(config: EngineConfig) -> EngineConfig:
    return replace(config, model=replace(config.model, vocab_size=NUM_TOKENS, eos_token_ids=(2,)))


def table(seed: int, *, near: np.ndarray | None = None) -> np.ndarray:
    """Logits by place and last token; `near` others, they are half those."""
    drawn = 1.5 * np.random.default_rng(seed).normal(size=(NUM_PLACES, NUM_TOKENS, NUM_TOKENS))
    return drawn if near is None else (near + drawn) / 2


class TableExecutor(HistoryExecutor):
    """Implements `Executor`, as quickly as thousands of answers want it."""

    def __init__(self, config: EngineConfig, logits: np.ndarray) -> None:
        super().__init__(config)
        self._table = torch.from_numpy(logits).float()

    def forward(self, batch: StepBatch, embeds: torch.Tensor | None = None) -> torch.Tensor:
        del embeds
        self.num_rows += len(batch.token_ids)
        rows = np.stack((batch.positions % NUM_PLACES, batch.token_ids), axis=1)
        return torch.from_numpy(rows)

    def logits(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        places, tokens = hidden[torch.from_numpy(rows)].T
        return self._table[places, tokens]


def row(
    logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams
) -> np.ndarray:
    """Probabilities of the token behind `output`."""
    seen = [*prompt, *output]
    scores = logits[(len(seen) - 1) % NUM_PLACES, seen[-1]].copy()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in range(NUM_TOKENS):
        if token in seen:
            up = scores[token] > 0
            scores[token] *= 1 / params.repetition_penalty if up else params.repetition_penalty
        times = output.count(token)
        scores[token] -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if len(output) < params.min_tokens:
        scores[2] = -np.inf
    probs = np.exp((scores - scores.max()) / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0
    return probs / probs.sum()


def joint(logits: np.ndarray, prompt: list[int], length: int, params: SamplingParams) -> np.ndarray:
    """The probability of each answer of `length` tokens, by token in each place."""
    answers = np.zeros((NUM_TOKENS,) * length)
    for answer, chance in _continued(logits, prompt, [], length, params):
        answers[tuple(answer)] = chance
    return answers


def _continued(
    logits: np.ndarray, prompt: list[int], output: list[int], length: int, params: SamplingParams
) -> Iterator[tuple[list[int], float]]:
    if len(output) == length:
        yield output, 1.0
        return
    for token, chance in enumerate(row(logits, prompt, output, params)):
        if chance:
            for answer, rest in _continued(logits, prompt, [*output, token], length, params):
                yield answer, chance * rest


def surprise(counts: np.ndarray, probs: np.ndarray) -> float:
    """How many standard deviations the chi-square of `counts` lies above what `probs` give.

    By Wilson and Hilferty's cube root. Cells that expect few counts are taken together; counts
    where there must be none are infinitely surprising.
    """
    counts, probs = counts.ravel(), probs.ravel()
    if counts[probs == 0].any():
        return np.inf
    expected = counts.sum() * probs
    few = expected < 8
    observed = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    if expected[-1] < 8:
        observed[-2] += observed[-1]
        expected[-2] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    chi = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    spread = 2 / (9 * freedom)
    return float(((chi / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))


def views(length: int) -> list[tuple[int, ...]]:
    """The places to look at together: each, each with the one behind it, and the outer two."""
    pairs = [(i, j) for i, j in product(range(length), repeat=2) if j in (i + 1, length - 1)]
    return [*((i,) for i in range(length)), *(pair for pair in pairs if pair[0] != pair[1])]


def marginal(answers: np.ndarray, places: tuple[int, ...]) -> np.ndarray:
    others = tuple(i for i in range(answers.ndim) if i not in places)
    return answers.sum(axis=others)
