"""Have the embedded model answer many chats, and keep what a draft head learns from.

Run: python examples/training/collect_answers.py FOLDER [--chats 1600]
Beside the tokens of an answer these are the rows between the model's layers, as they are when it is
served: the engine hands them to whatever drafts, here to a recorder. One file for each 64 chats.
Adapters that lie in platform/demo/parts answer a share of chats of their own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from base_model import PARTS
from safetensors.numpy import save_file
from tasks import chats

from plait import LLM, SamplingParams
from plait.platform.drafting import NoDrafts

if TYPE_CHECKING:
    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence as Running
    from plait.platform.core import StepPlan, StepResult

SEED = 20263
TAPS = (10, 20, 30)  # after how many of the 30 layers
ROWS = 64  # chats at once
MAX_TOKENS = 144
TASKS = ("fields", "sql", "tone")
TASK_ROWS = 4  # of each adapter, in each file


class Recorder(NoDrafts):
    """Implements `Drafter`: drafts nothing, and keeps the tapped rows of every sequence."""

    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.sequences: dict[int, Running] = {}

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """All steps are of interest."""
        del plan
        return TAPS

    def ingest(
        self, plan: StepPlan, batch: StepBatch, taps: torch.Tensor | None, result: StepResult
    ) -> None:
        """Keep a step's rows."""
        del result
        assert taps is not None
        for span, (start, end) in zip(plan.spans, pairwise(batch.query_start), strict=True):
            self.rows[span.sequence.seq_id].append(taps[start:end].half())
            self.sequences[span.sequence.seq_id] = span.sequence

    def take(self) -> dict[str, np.ndarray]:
        """All that was recorded, sequences one behind the other; forgets it."""
        tokens, rows, lengths, prompts = [], [], [], []
        for seq_id, parts in self.rows.items():
            seen, sequence = torch.cat(parts), self.sequences[seq_id]
            rows.append(seen.numpy())
            tokens += sequence.tokens[: len(seen)]
            lengths.append(len(seen))
            prompts.append(len(sequence.request.prompt_token_ids))
        self.rows.clear()
        self.sequences.clear()
        return {
            "tokens": np.array(tokens, np.int32),
            "rows": np.concatenate(rows),
            "lengths": np.array(lengths, np.int32),
            "prompts": np.array(prompts, np.int32),
        }


def main() -> None:
    """Answer chats, 64 at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chats", type=int, default=1600)
    parser.add_argument("--split", choices=("train", "test"), default="train")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prompts = chats.make(options.split, SEED, options.chats)
    began, num_tokens = time.monotonic(), 0
    adapters = {task: PARTS / task for task in TASKS if (PARTS / task).is_dir()}
    with LLM(
        adapters=adapters, enable_prefix_caching=False, speculation="off", progress=False
    ) as llm:
        llm._engine._drafter = recorder = Recorder()
        for index, at in enumerate(range(0, len(prompts), ROWS)):
            _ask(llm, prompts[at : at + ROWS], at)
            for task in adapters:
                examples = importlib.import_module(f"tasks.{task}").make(
                    options.split, SEED + at, TASK_ROWS
                )
                _ask(llm, [e.prompt for e in examples], at, task)
            found = recorder.take()
            save_file(found, options.folder / f"{index:03d}.safetensors")
            num_tokens += len(found["tokens"])
            seconds = time.monotonic() - began
            sys.stdout.write(f"{at + ROWS} chats  {num_tokens} tokens  {seconds:.0f} s\n")
            sys.stdout.flush()


def _ask(llm: LLM, prompts: Sequence[str], seed: int, adapter: str | None = None) -> None:
    """Two of three answers are the most likely ones, the third is drawn."""
    params = [
        SamplingParams(temperature=0.7 * (i % 3 == 0), seed=seed + i, max_tokens=MAX_TOKENS)
        for i in range(len(prompts))
    ]
    llm.chat([[{"role": "user", "content": p}] for p in prompts], params, adapter=adapter)


if __name__ == "__main__":
    main()
