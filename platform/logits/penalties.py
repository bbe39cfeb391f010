"""Changes of a row's logits before a token is chosen: what a request bans, favours or damps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from plait.platform.core import SamplingParams, Sequence

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_BANNED = np.float32(-np.inf)


@dataclass(slots=True)
class History:
    """The tokens of one sequence as penalties see them; grows with its output."""

    prompt: Ints  # its prompt's different tokens
    counts: dict[int, int] = field(default_factory=dict)  # of output tokens
    num_counted: int = 0

    def with_drafts(self, seq: Sequence, drafts: tuple[int, ...]) -> Mapping[int, int]:
        """Counts of the output of its sequence followed by `drafts`."""
        output = seq.tokens[seq.num_prompt_tokens + self.num_counted :]
        self.num_counted += len(output)
        _count(self.counts, output)
        return _count(dict(self.counts), drafts) if drafts else self.counts


def _count(counts: dict[int, int], tokens: Iterable[int]) -> dict[int, int]:
    for token in tokens:
        counts[token] = counts.get(token, 0) + 1
    return counts


class Histories:
    """Histories of sequences with penalties. They keep none alive, and go with it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._histories: WeakKeyDictionary[Sequence, History] = WeakKeyDictionary()

    def of(self, seq: Sequence) -> History:
        """The history of `seq`, kept or new."""
        history = self._histories.get(seq)
        if history is None:
            # Placeholders of images may lie outside the vocabulary.
            prompt = np.unique(np.array(seq.request.prompt_token_ids, np.int64))
            history = History(prompt[prompt < (seq.request.vocab_size or self._vocab_size)])
            self._histories[seq] = history
        return history


def changes_logits(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether `apply` would change anything."""
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids is not None
        or num_output_tokens < params.min_tokens
    )


def apply(
    logits: Floats,
    seq: Sequence,
    drafts: tuple[int, ...],
    eos_token_ids: tuple[int, ...],
    histories: Histories,
) -> Floats:
    """A changed copy of one row, as though `drafts` had already been output.

    In vLLM's order: allowed_token_ids, bad_words, min_tokens, logit_bias, repetition penalty
    (prompt and output), frequency and presence penalty (output).
    """
    params = seq.request.params
    logits = _only(logits, params.allowed_token_ids)
    for token in _completing(seq.request.bad_word_token_ids, seq, drafts):
        logits[token] = _BANNED
    if seq.num_output_tokens + len(drafts) < params.min_tokens:
        _ban_stops(logits, params, eos_token_ids)
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
        history = histories.of(seq)
        _damp(logits, history.prompt, history.with_drafts(seq, drafts), params)
    return logits


def _only(logits: Floats, allowed: Iterable[int] | None) -> Floats:
    if allowed is None:
        return logits.copy()
    ids = np.fromiter(allowed, np.int64)
    only = np.full_like(logits, _BANNED)
    only[ids] = logits[ids]
    return only


def _completing(
    words: Iterable[tuple[int, ...]], seq: Sequence, drafts: tuple[int, ...]
) -> list[int]:
    """Tokens that would complete one of `words` within the output (as in vLLM)."""
    longest = max(map(len, words), default=1)
    begin = max(seq.num_prompt_tokens, len(seq.tokens) - longest)
    output = (*seq.tokens[begin:], *drafts)
    return [w[-1] for w in words if len(w) == 1 or output[-(len(w) - 1) :] == w[:-1]]


def _ban_stops(logits: Floats, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
    """Ban what would end the sequence too early, unless nothing else is allowed."""
    ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    stops = np.array([i for i in ids if 0 <= i < len(logits)], np.int64)
    kept = logits[stops]
    logits[stops] = _BANNED
    if logits.max() == _BANNED:
        logits[stops] = kept


def _damp(logits: Floats, prompt: Ints, counts: Mapping[int, int], params: SamplingParams) -> None:
    if params.repetition_penalty != 1:
        # A token of both prompt and output is written twice, with the same value.
        ids = np.concatenate((prompt, np.fromiter(counts, np.int64, len(counts))))
        penalty = np.float32(params.repetition_penalty)
        values = logits[ids]
        logits[ids] = np.where(values > 0, values / penalty, values * penalty)
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = np.fromiter(counts, np.int64, len(counts))
        times = np.fromiter(counts.values(), np.float32, len(counts))
        logits[ids] -= np.float32(params.frequency_penalty) * times
        logits[ids] -= np.float32(params.presence_penalty)
