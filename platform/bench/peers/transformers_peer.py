"""transformers' own batched `generate`."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

Step = Callable[[list[tuple[int, list[int]]]], None]


class Engine:
    """A checkpoint loaded and run as transformers' documentation does it."""

    def __init__(self, weights: str, *, num_threads: int, dtype: str) -> None:
        """`dtype` by torch's name."""
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(num_threads)
        self.versions = {n: importlib.metadata.version(n) for n in ("transformers", "torch")}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            weights, dtype=getattr(self._torch, dtype), local_files_only=True
        ).eval()

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int, step: Step) -> None:
        """See `worker`. Shorter prompts are padded on the left."""
        torch = self._torch
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                pad_token_id=0,
                eos_token_id=None,
                streamer=_Streamer(step),
            )


class _Streamer:
    """What `generate` calls with each step's tokens; the first call brings the prompt."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Tokens of all sequences, in their order."""
        if not self._is_prompt:
            self._step([(i, [int(token)]) for i, token in enumerate(value.flatten())])
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is left to do."""
