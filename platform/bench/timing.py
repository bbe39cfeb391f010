"""How long one batch took, split where the prompts end and the answers begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One batch from its first step to its last token.

    `num_decode_tokens` are those made after every sequence had its first token, in the last
    `total_s - prefill_s` seconds; dividing the two gives a rate without any prompt work in it.
    """

    total_s: float
    prefill_s: float  # until every sequence has its first token
    num_prompt_tokens: int
    num_output_tokens: int
    num_decode_tokens: int

    @property
    def output_rate(self) -> float:
        """Output tokens per second, prompt work included."""
        return self.num_output_tokens / self.total_s

    @property
    def decode_rate(self) -> float:
        """Output tokens per second once all prompts are done."""
        decode_s = self.total_s - self.prefill_s
        return self.num_decode_tokens / decode_s if decode_s > 0 else float("nan")

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.num_prompt_tokens / self.prefill_s


class Runner(Protocol):
    """Something that can answer a batch: an engine of ours, or a peer."""

    name: str

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Timing:
        """Answer all prompts greedily with exactly `output_tokens` tokens each."""


class StepClock:
    """Builds a `Timing` from the moments at which sequences got tokens."""

    def __init__(self, batch_size: int, num_prompt_tokens: int, start_s: float) -> None:
        self._start_s = start_s
        self._waiting = set(range(batch_size))
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output = 0
        self._num_at_prefill_end = 0
        self._prefill_end_s = self._last_s = start_s

    def tokens(self, sequence: int, count: int, now_s: float) -> None:
        """`count` tokens of `sequence` arrived; calls of one step carry the same `now_s`."""
        if count == 0:
            return
        self._num_output += count
        self._last_s = now_s
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._prefill_end_s = now_s
        # What arrives in the step that ends the last prefill is not decode work.
        if now_s <= self._prefill_end_s:
            self._num_at_prefill_end = self._num_output

    def timing(self) -> Timing:
        """The whole, once every sequence has ended."""
        if self._waiting:
            raise RuntimeError(f"{len(self._waiting)} sequences never got a token")
        return Timing(
            total_s=self._last_s - self._start_s,
            prefill_s=self._prefill_end_s - self._start_s,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output,
            num_decode_tokens=self._num_output - self._num_at_prefill_end,
        )
