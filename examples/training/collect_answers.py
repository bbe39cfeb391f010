"""Have the embedded model answer many chats, and keep what a draft head learns from.

Run: python examples/training/collect_answers.py FOLDER [--files 18] [--first 0]
Most questions are the model's own: what it writes where a user's turn begins ("Magpie",
arXiv:2406.08464); the others are made from lists. Beside the tokens of an answer these are the rows
between the model's layers, as they are when it is served: the engine hands them to whatever drafts,
here to a recorder. Adapters that lie in platform/demo/parts answer a share of chats of their own.
Less than three minutes of a core for each file of 68,000 tokens; files are independent, so two
processes halve the time.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
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
OWN = 256  # questions of the model's own in a file, less those that it does not end
LISTED = 64  # from lists
TASKS = ("fields", "sql", "tone")
TASK_ROWS = 4  # of each adapter
MOST_ROWS = 96  # at once
KV_BYTES = 1 << 30  # a quarter more than so many rows fill
QUESTION_TOKENS = 96
ANSWER_TOKENS = 224
Asked = tuple[str, str | None]  # a question, and which adapter is to answer


class Recorder(NoDrafts):
    """Implements `Drafter`: drafts nothing, and keeps the tapped rows of every sequence."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []  # whole: a row alone breaks the heap into crumbs
        self.num_rows = 0
        self.places: dict[int, list[int]] = defaultdict(list)  # of a sequence, among all rows
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
        for span, (start, end) in zip(
            plan.spans, itertools.pairwise(batch.query_start), strict=True
        ):
            self.places[span.sequence.seq_id] += range(self.num_rows + start, self.num_rows + end)
            self.sequences[span.sequence.seq_id] = span.sequence
        self.steps.append(taps.half())
        self.num_rows += len(taps)

    def take(self) -> dict[str, np.ndarray]:
        """All that was recorded, sequences one behind the other."""
        tokens, order, lengths, prompts = [], [], [], []
        for seq_id, places in self.places.items():
            sequence = self.sequences[seq_id]
            order += places
            tokens += sequence.tokens[: len(places)]
            lengths.append(len(places))
            prompts.append(len(sequence.request.prompt_token_ids))
        rows = torch.cat(self.steps)[order].numpy()
        return {
            "tokens": np.array(tokens, np.int32),
            "rows": rows,
            "lengths": np.array(lengths, np.int32),
            "prompts": np.array(prompts, np.int32),
        }


def main() -> None:
    """Answer chats, file after file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=18)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    adapters = {task: PARTS / task for task in TASKS if (PARTS / task).is_dir()}
    listed = chats.make("train", SEED)
    began, num_tokens = time.monotonic(), 0
    with LLM(
        adapters=adapters,
        enable_prefix_caching=False,
        speculation="off",
        max_num_seqs=MOST_ROWS,
        kv_cache_bytes=KV_BYTES,
        progress=False,
    ) as llm:
        for number in range(options.first, options.first + options.files):
            seed = SEED + number * 1000
            asked: list[Asked] = [
                *((q, None) for q in _invent(llm, seed)),
                *((q, None) for q in random.Random(seed).sample(listed, LISTED)),
            ]
            for task in adapters:
                examples = importlib.import_module(f"tasks.{task}").make("train", seed, TASK_ROWS)
                asked += [(e.prompt, task) for e in examples]
            llm._engine._drafter = recorder = Recorder()
            _ask(llm, asked, seed)
            llm._engine._drafter = NoDrafts()
            found = recorder.take()
            save_file(found, options.folder / f"{number:03d}.safetensors")
            num_tokens += len(found["tokens"])
            seconds = time.monotonic() - began
            sys.stdout.write(f"{number:03d}: {num_tokens} tokens  {seconds:.0f} s\n")
            sys.stdout.flush()


def _invent(llm: LLM, seed: int) -> list[str]:
    """What the model writes for its user; what it did not end is left out."""
    two = (llm.encode_chat([{"role": "user", "content": text}]) for text in "?1")
    begin = [
        a for a, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*two, strict=False))
    ]
    params = [
        SamplingParams(temperature=1.0, top_p=0.95, seed=seed + i, max_tokens=QUESTION_TOKENS)
        for i in range(OWN)
    ]
    outputs = [o.outputs[0] for o in llm.generate([begin] * OWN, params)]
    texts = [o.text.strip() for o in outputs if o.finish_reason == "stop"]
    return [text for text in texts if text]


def _ask(llm: LLM, asked: Sequence[Asked], seed: int) -> None:
    """Two of three answers are the most likely ones, the third is drawn.

    All in one call: whoever comes to an end makes room for the next, so that steps stay full.
    """
    params = [
        SamplingParams(temperature=0.7 * (i % 3 == 0), seed=seed + i, max_tokens=ANSWER_TOKENS)
        for i in range(len(asked))
    ]
    chats = [[{"role": "user", "content": question}] for question, _ in asked]
    llm.chat(chats, params, adapter=[adapter for _, adapter in asked])


if __name__ == "__main__":
    main()
