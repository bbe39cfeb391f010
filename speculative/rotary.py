"""Rotary frequencies of a draft head's layer, from what its config says.

The forms that have one set of frequencies for every length:

    default   theta^(-2i/size) for pair i
    linear    divided by the factor
    llama3    divided where a turn takes longer than the old context over `low_freq_factor`, as they
              are where it is shorter than that over `high_freq_factor`, blended in between
    yarn      blended from as they are to divided, over the pairs that turn `beta_fast` to
              `beta_slow` times in the old context; cosines and sines are scaled as well

(YaRN: arXiv 2309.00071.) Each is rounded as transformers rounds it, which heads were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """One kind of rotation of heads of `size` values."""

    size: int
    theta: float
    kind: str  # one of ROPES
    parameters: Mapping[str, Any]  # of the kind
    context: int  # that the model was trained with, where the parameters name no other

    def frequencies(self) -> tuple[Tensor, float]:
        """By pair, fp32 `[size / 2]`, and what cosines and sines are multiplied with.

        Raises `KeyError` for a parameter that is missing.
        """
        exponents = torch.arange(0, self.size, 2, dtype=torch.float32) / self.size
        periods = self.theta**exponents
        plain = 1.0 / periods
        if self.kind == "default":
            return plain, 1.0
        factor = self.parameters["factor"]
        if self.kind == "linear":
            return plain / factor, 1.0
        if self.kind == "llama3":
            return self._llama3(plain, factor), 1.0
        kept = 1 - self._ramp()
        divided = 1.0 / (factor * periods)
        return divided * (1 - kept) + plain * kept, self._yarn_scale(factor)

    @property
    def _old_context(self) -> int:
        return int(self.parameters.get("original_max_position_embeddings") or self.context)

    def _llama3(self, plain: Tensor, factor: float) -> Tensor:
        low, high = self.parameters["low_freq_factor"], self.parameters["high_freq_factor"]
        old = self._old_context
        length = 2 * math.pi / plain  # of one turn
        share = (old / length - low) / (high - low)
        blended = (1 - share) * plain / factor + share * plain
        slow = torch.where(length > old / low, plain / factor, blended)
        return torch.where(length < old / high, plain, slow)

    def _ramp(self) -> Tensor:
        """0 for pairs that stay as they are, 1 for those that are divided, straight between."""
        fast = self._pair_turning(self.parameters.get("beta_fast") or 32)
        slow = self._pair_turning(self.parameters.get("beta_slow") or 1)
        if self.parameters.get("truncate", True):
            fast, slow = math.floor(fast), math.ceil(slow)
        first, last = max(fast, 0), min(slow, self.size - 1)
        if first == last:
            last += 0.001
        pairs = torch.arange(self.size // 2, dtype=torch.float32)
        return ((pairs - first) / (last - first)).clamp(0, 1)

    def _pair_turning(self, times: float) -> float:
        """Which pair turns so often in the old context, with a fraction."""
        length = self._old_context / (times * 2 * math.pi)
        return self.size * math.log(length) / (2 * math.log(self.theta))

    def _yarn_scale(self, factor: float) -> float:
        given = self.parameters.get("attention_factor")
        if given is not None:
            return float(given)
        part, whole = self.parameters.get("mscale"), self.parameters.get("mscale_all_dim")
        if part and whole:
            return _growth(factor, part) / _growth(factor, whole)
        return _growth(factor, 1.0)


def _growth(factor: float, by: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0
