"""transformers' own batched `generate`, as the peer of the throughput benchmark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from plait.platform.bench.timing import StepClock, Timing


class TransformersRunner:
    """A model loaded and run as transformers' documentation does it, in the same process."""

    name = "transformers"

    def __init__(self, source: str, dtype: str, *, revision: str | None = None) -> None:
        kwargs: dict[str, Any] = {"dtype": getattr(torch, dtype)}
        path = Path(source)
        if path.suffix == ".gguf":
            source, kwargs["gguf_file"] = str(path.parent), path.name
        elif revision:
            kwargs["revision"] = revision
        self._model: Any = AutoModelForCausalLM.from_pretrained(source, **kwargs)

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Timing:
        """Greedy, exactly `output_tokens` each; shorter prompts are padded on the left."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        clock = StepClock(len(prompts), sum(map(len, prompts)), time.perf_counter())
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                pad_token_id=0,
                eos_token_id=None,
                streamer=_Steps(clock),
            )
        return clock.timing()


class _Steps(BaseStreamer):
    """Notes when each step's tokens arrive; the first call brings the prompt."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            now_s = time.perf_counter()
            for sequence in range(len(value)):
                self._clock.tokens(sequence, 1, now_s)
        self._prompt_seen = True

    def end(self) -> None:
        pass
