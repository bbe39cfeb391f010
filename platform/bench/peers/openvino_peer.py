"""OpenVINO GenAI's continuous batching, from GGUF files."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

Step = Callable[[list[tuple[int, list[int]]]], None]


class Engine:
    """A GGUF file compiled for the CPU."""

    def __init__(self, weights: str, *, num_threads: int, tokens: int, sequences: int) -> None:
        """`sequences` of at most `tokens` each."""
        self._genai: Any = importlib.import_module("openvino_genai")
        self._numpy: Any = importlib.import_module("numpy")
        self._tensor: Any = importlib.import_module("openvino").Tensor
        self.versions = {"openvino-genai": importlib.metadata.version("openvino-genai")}
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs = sequences
        scheduler.max_num_batched_tokens = max(2048, tokens)
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1  # GB
        self._pipeline = self._genai.ContinuousBatchingPipeline(
            weights, scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads}
        )
        self._num_requests = 0

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int, step: Step) -> None:
        """See `worker`."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            self._pipeline.add_request(self._num_requests + number, self._ids(prompt), config)
            for number, prompt in enumerate(prompts)
        ]
        self._num_requests += len(prompts)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            step(
                [
                    (sequence, [int(token) for token in output.generated_ids])
                    for sequence, handle in enumerate(handles)
                    if handle.can_read()
                    for output in handle.read().values()
                ]
            )

    def _ids(self, prompt: Sequence[int]) -> Any:
        return self._tensor(self._numpy.array([prompt], dtype="int64"))
