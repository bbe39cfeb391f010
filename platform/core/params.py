"""How a request's tokens are chosen: `SamplingParams`, with the range of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from plait.platform.core.values import (
    InvalidParameter,
    integer,
    integer_or_none,
    integers,
    number,
    strings,
    switch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens of one request are chosen, and when to stop. Field names are vLLM's.

    Raises `InvalidParameter` for a value outside its range. Values that depend on the model
    (token ids against the vocabulary, length against the context) are checked at admission.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: up to the context's end
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: SequenceOf[int] | None = None
    bad_words: SequenceOf[str] = ()
    seed: int | None = None  # None: random, drawn once at admission
    stop: SequenceOf[str] | str = ()
    stop_token_ids: SequenceOf[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many top alternatives; 0: only the chosen token's
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, convert in _CONVERT.items():
            object.__setattr__(self, name, convert(name, getattr(self, name)))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check_sampling(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _allowed(name: str, value: Any) -> tuple[int, ...] | None:
    tokens = None if value is None else integers(name, value)
    if tokens == ():
        raise InvalidParameter(name, f"{name} must not be empty")
    return tokens


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value or {}, Mapping):
        raise InvalidParameter(name, f"{name} maps token ids to numbers, got {value!r}")
    biases = {integer(name, t): number(name, b) for t, b in (value or {}).items()}
    if not all(-100 <= bias <= 100 for bias in biases.values()):
        raise InvalidParameter(name, f"{name} maps token ids to [-100, 100]")
    return biases


_CONVERT: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("n", "min_tokens", "top_k"), integer),
    **dict.fromkeys(("max_tokens", "logprobs", "prompt_logprobs", "seed"), integer_or_none),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), number),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), number),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), switch),
    "spaces_between_special_tokens": switch,
    "stop": strings,
    "bad_words": strings,
    "stop_token_ids": integers,
    "allowed_token_ids": _allowed,
    "logit_bias": _biases,
}
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, 16),
    "min_tokens": (0, math.inf),
    "max_tokens": (0, math.inf),
    "logprobs": (0, math.inf),
    "prompt_logprobs": (0, math.inf),
    "temperature": (0, 100),
    "top_p": (0, 1),  # 0 itself is refused below
    "min_p": (0, 1),
    "top_k": (0, math.inf),
    # It divides logits, and by less a float32 comes near its end: a logit must stay finite.
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}


def _check_sampling(p: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(p, name)
        if value is not None and not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
            raise InvalidParameter(name, f"{name} must be {bounds}, got {value!r}")
    if p.top_p == 0:
        raise InvalidParameter("top_p", "top_p must be greater than 0")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidParameter("min_tokens", f"min_tokens {p.min_tokens} > max_tokens")
