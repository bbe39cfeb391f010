"""llama.cpp by its C functions, through llama-cpp-python: parallel sequences in one batch."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

Step = Callable[[list[tuple[int, list[int]]]], None]


class Engine:
    """A GGUF file loaded as llama.cpp's own programs do; the batch is sized for the workload."""

    def __init__(self, weights: str, *, num_threads: int, tokens: int, sequences: int) -> None:
        """`sequences` of at most `tokens` each."""
        self._c: Any = importlib.import_module("llama_cpp.llama_cpp")
        self.versions = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}
        c = self._c
        self._quiet = c.llama_log_callback(lambda *_: None)
        c.llama_log_set(self._quiet, None)
        c.llama_backend_init()
        self._model = c.llama_model_load_from_file(weights.encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx = tokens * sequences
        params.n_batch = tokens * sequences  # the library cuts it into pieces of n_ubatch
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = num_threads
        self._context = c.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {weights}")
        self._batch = c.llama_batch_init(tokens * sequences, 0, 1)
        self._sampler = c.llama_sampler_init_greedy()

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int, step: Step) -> None:
        """See `worker`."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        rows = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        newest = self._decode(rows)
        step(newest)
        for number in range(1, output_tokens):
            newest = self._decode(
                [
                    (tokens[0], len(prompts[sequence]) + number - 1, sequence, True)
                    for sequence, tokens in newest
                ]
            )
            step(newest)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[tuple[int, list[int]]]:
        """Compute (token, position, sequence, whether logits are wanted) and sample greedily."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if code := self._c.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")
        sample = self._c.llama_sampler_sample
        return [
            (sequence, [int(sample(self._sampler, self._context, i))])
            for i, (_, _, sequence, is_wanted) in enumerate(rows)
            if is_wanted
        ]
