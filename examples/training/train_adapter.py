"""Train one LoRA adapter of the embedded model, with PEFT, on examples that a task makes.

Run: python examples/training/train_adapter.py fields|sql|tone|sight [--steps 80]
Takes 10 to 20 minutes on one core. Writes platform/demo/parts/TASK, in PEFT's own format;
`evaluate.py` then measures it and adds a card. The same seed gives the same adapter on the same
machine.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from base_model import PARTS, chat_ids, load
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional

SEED = 20260
RANK = 8
ROWS = 8  # examples of a step
STEPS = {"fields": (150, 24), "sql": (150,), "tone": (80,), "sight": (44, 36, 20)}  # in rounds
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
LEARNING_RATES = 1e-3, 6e-4, 6e-4  # by round
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Train, save, say how far it came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(STEPS))
    parser.add_argument("--steps", type=int, help="other than those that the weights were made by")
    options = parser.parse_args()
    rounds = (options.steps,) if options.steps else STEPS[options.task]
    torch.manual_seed(SEED)
    model, tokenizer = load()
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    task = importlib.import_module(f"tasks.{options.task}")
    examples = task.make("train", SEED, sum(rounds) * ROWS)
    chats = iter([chat_ids(tokenizer, e.prompt, e.answer) for e in examples])
    for steps, rate in zip(rounds, LEARNING_RATES, strict=False):
        _train(model, list(_batches(list(itertools.islice(chats, steps * ROWS)))), rate)
    folder = PARTS / options.task
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.half()
    model.peft_config["default"].base_model_name_or_path = BASE  # not where it lies here
    model.save_pretrained(folder)
    (folder / "adapter_model.safetensors").chmod(0o644)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's own form; evaluate.py writes ours
    sys.stdout.write(f"saved {folder.name}\n")


def _batches(chats: Sequence[tuple[list[int], int]]) -> Iterator[Sequence[tuple[list[int], int]]]:
    """Steps of chats of about one length, in a random order."""
    window = 8 * ROWS
    for start in range(0, len(chats), window):
        some = sorted(chats[start : start + window], key=lambda chat: len(chat[0]))
        rows = [some[at : at + ROWS] for at in range(0, len(some), ROWS)]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(start)).tolist()
        yield from (rows[i] for i in order)


def _train(model: Any, batches: Sequence[Sequence[tuple[list[int], int]]], most: float) -> None:
    """One round, in which the rate of learning rises to `most` and falls to nothing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    began, shown = time.monotonic(), 0.0
    for step, batch in enumerate(batches):
        done = step / len(batches)
        rate = most * min(1.0, step / 10 + 0.1) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown = loss.item() if step == 0 else 0.9 * shown + 0.1 * loss.item()
        if step % 10 == 0:
            seconds = time.monotonic() - began
            sys.stdout.write(f"step {step}/{len(batches)}  loss {shown:.4f}  {seconds:.0f} s\n")
            sys.stdout.flush()


def _loss(model: Any, batch: Sequence[tuple[list[int], int]]) -> Tensor:
    """Cross entropy of the answers' tokens; logits are made for these alone.

    What all prompts begin with, such as the system's message, is computed once.
    """
    whole = model.base_model.model
    shared = _num_shared(batch)
    behind = [(ids[shared:], start - shared) for ids, start in batch]
    width = max(len(ids) for ids, _ in behind)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in behind])
    mask = torch.tensor([[1] * (shared + len(i)) + [0] * (width - len(i)) for i, _ in behind])
    first = whole.model(input_ids=torch.tensor([batch[0][0][:shared]]), use_cache=True)
    cache = first.past_key_values
    cache.batch_repeat_interleave(len(batch))
    hidden = whole.model(
        input_ids=ids, attention_mask=mask, cache=cache, use_cache=True
    ).last_hidden_state
    rows, columns = zip(
        *((r, c) for r, (ids, start) in enumerate(behind) for c in range(start, len(ids))),
        strict=True,
    )
    at = torch.tensor(rows), torch.tensor(columns)
    logits = whole.lm_head(hidden[at[0], at[1] - 1])
    return functional.cross_entropy(logits, ids[at])


def _num_shared(batch: Sequence[tuple[list[int], int]]) -> int:
    """How many tokens all prompts begin with, always less than the shortest has."""
    shortest = min(start for _, start in batch) - 1
    columns = zip(*(ids[:shortest] for ids, _ in batch), strict=True)
    return next((n for n, column in enumerate(columns) if len({*column}) > 1), shortest)


if __name__ == "__main__":
    main()
