"""transformers' own batched `generate`, as the peer of the throughput benchmark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, modeling_gguf_pytorch_utils
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from plait.platform.bench.timing import StepClock, Timing
from plait.platform.errors import ModelUnsupported

# Its annotations are partial: through Any it is called as it is documented.
_gguf: Any = modeling_gguf_pytorch_utils
_auto_model: Any = AutoModelForCausalLM
_logging: Any = transformers_logging


class TransformersRunner:
    """A model loaded and run as transformers' documentation does it, in the same process."""

    name = "transformers"

    def __init__(self, source: str, dtype: str, *, revision: str | None = None) -> None:
        kind = getattr(torch, dtype)
        _logging.disable_progress_bar()
        if Path(source).suffix == ".gguf":
            self._model: Any = _load_gguf(source, kind)
        else:
            self._model = _auto_model.from_pretrained(
                source, dtype=kind, revision=revision or "main"
            )
        self._model.eval()

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


def _load_gguf(path: str, dtype: torch.dtype) -> Any:
    """What `from_pretrained(…, gguf_file=…)` does, which insists on one more package."""
    header = _gguf.load_gguf_checkpoint(path, return_tensors=False)
    config = AutoConfig.for_model(**header["config"])
    model: Any = _auto_model.from_config(config, dtype=dtype)
    tensors = _gguf.load_gguf_checkpoint(
        path, return_tensors=True, model_to_load=model, torch_dtype=dtype
    )["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ModelUnsupported(f"transformers reads {Path(path).name} only in part: no comparison")
    return model


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
