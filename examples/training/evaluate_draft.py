"""Measure the draft head as it is served, on chats of topics and forms that training never saw.

Run: python examples/training/evaluate_draft.py [--chats 24] [--depth 4] [--no-card]
Writes the model card of platform/demo/parts/draft. Speeds are of one sequence at a time: pin it to
one core, as with `taskset -c 0`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from base_model import PARTS
from safetensors import safe_open
from tasks import chats
from train_draft import ROWS

from plait import LLM, SamplingParams, Speculation
from plait.platform.drafting import NoDrafts
from plait.speculative.source import Want

if TYPE_CHECKING:
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence as Running
    from plait.platform.core import StepPlan, StepResult
    from plait.speculative.source import TappedSource

SEED = 20265
MAX_TOKENS = 128


class FixedDepth(NoDrafts):
    """Implements `Drafter`: always verifies as many drafts of a head, and counts what holds."""

    def __init__(self, head: TappedSource, depth: int) -> None:
        self._head = head
        self._depth = depth
        self.num_verified = 0
        self.by_depth = [0] * depth

    def draft(self, sequences: Sequence[Running], room: int) -> None:
        """As many for each, where so many may still be of use."""
        if room < self._depth * len(sequences):  # prompts fill this step
            return
        open_ = [s for s in sequences if s.max_total_tokens - len(s.tokens) > self._depth]
        wants = [Want(sequence=sequence, limit=self._depth) for sequence in open_]
        for want, draft in zip(wants, self._head.propose(wants), strict=True):
            want.sequence.drafts[:] = draft.tokens if draft else ()

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """What the head wants."""
        return self._head.taps if self._head.wants_taps(plan) else ()

    def ingest(
        self, plan: StepPlan, batch: StepBatch, taps: torch.Tensor | None, result: StepResult
    ) -> None:
        """Let the head go along."""
        self._head.ingest(plan, batch, taps, result)

    def computed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Count."""
        del seconds
        for span, found in zip(plan.spans, result.spans, strict=True):
            if span.drafts:
                self.num_verified += 1
                for place in range(len(found.token_ids) - 1):
                    self.by_depth[place] += 1

    @property
    def mean(self) -> float:
        """Drafts that held for each verification: tokens beside the one that comes anyway."""
        return sum(self.by_depth) / self.num_verified


def main() -> None:
    """Acceptance at a fixed depth, then speed as served, then the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--no-card", action="store_true")
    options = parser.parse_args()
    prompts = chats.make("test", SEED, options.chats)
    with LLM(draft_model=str(PARTS / "draft"), enable_prefix_caching=False, progress=False) as llm:
        plain_s, drafted_s = _speed(llm, prompts)
        drafter = llm._engine._drafter
        drafter._model._head._follows = lambda _sequence: True  # whatever that costs
        fixed = FixedDepth(drafter._model._head, options.depth)
        llm._engine._drafter = fixed
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        for at in range(0, len(prompts), 8):
            llm.chat([[{"role": "user", "content": p}] for p in prompts[at : at + 8]], params)
    shares = [n / fixed.num_verified for n in fixed.by_depth]
    sys.stdout.write(
        f"{fixed.mean:.2f} of {options.depth} drafts hold, by depth "
        f"{', '.join(f'{s:.2f}' for s in shares)}; speed {plain_s / drafted_s:.2f}\n"
    )
    if not options.no_card:
        _write_card(options, fixed.mean, shares, plain_s / drafted_s)


def _speed(llm: LLM, prompts: Sequence[str]) -> tuple[float, float]:
    """Seconds of decoding, without drafts and with: each chat both ways, one after the other."""
    for way in (Speculation(enabled=False), Speculation()):
        _decode(llm, "Hello.", way)
    plain = drafted = 0.0
    for prompt in prompts:
        plain += _decode(llm, prompt, Speculation(enabled=False))
        drafted += _decode(llm, prompt, Speculation())
    return plain, drafted


def _decode(llm: LLM, prompt: str, way: Speculation) -> float:
    """Seconds from the first token of an answer to its last."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    deltas = llm.stream_chat([{"role": "user", "content": prompt}], params, speculation=way)
    next(deltas)
    began = time.perf_counter()
    for _ in deltas:
        pass
    return time.perf_counter() - began


def _write_card(
    options: argparse.Namespace, mean: float, shares: Sequence[float], speed: float
) -> None:
    by_depth = ", ".join(f"{share:.2f}" for share in shares)
    with safe_open(PARTS / "draft" / "model.safetensors", "pt") as file:
        seen = {name: int(x) for name, x in file.metadata().items() if x.isdigit()}
    (PARTS / "draft" / "README.md").write_text(
        f"""# draft: an EAGLE-3 head for SmolLM2-135M-Instruct

It reads what the model has after 10, 20 and 30 of its layers and drafts the tokens that come next.
One layer of 9 heads, 8,192 of the model's tokens; embeddings and logit rows are the model's own and
not in the file. Served by `--draft platform/demo/parts/draft`.

Trained by `examples/training/collect_answers.py` ({seen["chats"]:,} chats, most of them questions
of the model's own, {seen["tokens"]:,} tokens; two of three answers greedy, the third drawn at
temperature 0.7) and `train_draft.py` beside it ({seen["steps"]:,} steps of {ROWS} chats, AdamW): it
learns the model's own probabilities, up to three tokens deep in its own drafts.

Measured by `examples/training/evaluate_draft.py` on {options.chats} chats of topics and forms that
training never saw, greedy, as served: at {options.depth} drafts to a verification {mean:.2f} hold
(all drafts up to depth 1, 2, …: {by_depth}). One answer at a time on one core of an x86 server
with AVX2, all drafts chosen as always, decoding is {speed:.2f} times as fast as without drafts.

It changes no token: what it drafts is verified. Served in 4 bits it costs about a tenth of a step;
most steps verify one of its drafts or one of repeated text, none where it is not sure enough.
"""
    )


if __name__ == "__main__":
    main()
