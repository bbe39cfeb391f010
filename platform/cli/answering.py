"""Who answers `plait chat` and `plait complete`: an engine in this process, or a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.platform.core import SamplingParams

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that may be shown now, and the counts so far (0 where not yet known)."""

    text: str = ""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None


class Answerer(Protocol):
    """Streams answers. Closing an iterator early stops its answer."""

    @property
    def name(self) -> str:
        """The model's served name."""

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[Piece]:
        """The answer to a conversation."""

    def complete(self, prompt: str, params: SamplingParams) -> Iterator[Piece]:
        """What follows a text."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """How fast an answer came. Feed it each piece as it arrives."""

    start_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None

    @classmethod
    def begin(cls) -> Pace:
        """The clock starts now."""
        return cls(start_s=time.perf_counter())

    def add(self, piece: Piece) -> None:
        """Count one piece."""
        now_s = time.perf_counter()
        if self.first_s is None and (piece.text or piece.num_output_tokens):
            self.first_s = now_s
        self.last_s = now_s
        self.num_prompt_tokens = piece.num_prompt_tokens or self.num_prompt_tokens
        self.num_output_tokens = piece.num_output_tokens or self.num_output_tokens
        self.finish_reason = piece.finish_reason or self.finish_reason

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return (self.first_s or self.last_s) - self.start_s

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first; None for answers too short to tell."""
        if self.first_s is None or self.num_output_tokens < 2 or self.last_s <= self.first_s:
            return None
        return (self.num_output_tokens - 1) / (self.last_s - self.first_s)

    def __str__(self) -> str:
        rate = f" · {self.rate:.1f} tok/s" if self.rate else ""
        return (
            f"TTFT {self.ttft_s * 1000:.0f} ms{rate} · {self.num_prompt_tokens} prompt + "
            f"{self.num_output_tokens} answer tokens · {self.finish_reason or 'stopped'}"
        )
