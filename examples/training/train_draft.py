"""Train the draft head of the embedded model on its own answers, as `collect_answers.py` kept them.

Run: python examples/training/train_draft.py FOLDER
Takes about an hour of one core. Writes platform/demo/parts/draft, an EAGLE-3 head. It learns the
model's own probabilities of the token after next, then up to three deep in drafts of its own
making.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from base_model import PARTS, load
from collect_answers import TAPS
from draft_head import Head, load_rows, save
from torch import Tensor
from torch.nn import functional

SEED = 20264
VOCABULARY = 8192  # tokens that it drafts
COMMON = 2048  # of them that it is always taught to tell apart; others where they occur
ROWS = 6  # chats of a step
LATER = 0.8  # how much each depth counts of the one before
Chat = tuple[Tensor, Tensor, int]


STEPS = 2500
RATE, RISE = 1.2e-3, 60
DEEPER = (0.5, 0.8)  # behind which shares of the steps drafts are two, three tokens deep


def main() -> None:
    """Train, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=PARTS / "draft")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    chats = [chat for file in sorted(options.folder.iterdir()) for chat in load_rows(file)]
    chats = [chat for chat in chats if len(chat[0]) > chat[2] + 5]
    model, _ = load()
    trainer = Trainer(model, *_frequent(chats))
    trainer.train(chats, options.steps)
    text = model.config
    save(
        trainer.head,
        options.out,
        trainer.target_ids,
        {
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.max_position_embeddings,
            "rope_theta": text.rope_parameters["rope_theta"],
            "eagle_aux_hidden_state_layer_ids": list(TAPS),
        },
        {
            "chats": len(chats),
            "tokens": sum(len(tokens) for tokens, _, _ in chats),
            "steps": options.steps,
        },
    )
    sys.stdout.write(f"saved {options.out.name}\n")


def _frequent(chats: Sequence[Chat]) -> tuple[Tensor, Tensor]:
    """The tokens most often seen, in the order of their ids; and which places have common ones.

    What was never seen is taken from the first ids, as these are common.
    """
    counts = torch.bincount(torch.cat([tokens for tokens, _, _ in chats]), minlength=VOCABULARY)
    counts[:VOCABULARY] += 1
    found = counts.argsort(descending=True, stable=True)[:VOCABULARY]
    ids = found.sort().values
    return ids, torch.isin(ids, found[:COMMON]).nonzero()[:, 0]


class Trainer:
    """A head, and what of the model it learns from."""

    def __init__(self, model: Any, target_ids: Tensor, common: Tensor) -> None:
        config = model.config
        self.target_ids = target_ids
        self._common = common
        self._embeddings = model.get_input_embeddings().weight.detach()
        self._table = model.lm_head.weight.detach()[target_ids].clone()
        self._norm, self._eps = model.model.norm.weight.detach(), config.rms_norm_eps
        self.head = Head(
            config.hidden_size,
            len(TAPS),
            eps=config.rms_norm_eps,
            theta=config.rope_parameters["rope_theta"],
        )
        self.head.start_from(model)

    def train(self, chats: Sequence[Chat], steps: int) -> None:
        """Go through all chats again and again, in another order each time."""
        epochs = (_batches(chats, SEED + epoch) for epoch in itertools.count())
        batches = itertools.islice(itertools.chain.from_iterable(epochs), steps)
        parameters = list(self.head.parameters())
        optimizer = torch.optim.AdamW(parameters, weight_decay=0.01, betas=(0.9, 0.95))
        began, shown = time.monotonic(), [0.0] * 4
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = _rate(step, steps)
            loss, right = self._loss(batch, 1 + sum(step >= share * steps for share in DEEPER))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            now = [loss.item(), *right]
            shown = [0.95 * a + 0.05 * b if a else b for a, b in zip(shown, now, strict=True)]
            if step % 20 == 0:
                seconds = time.monotonic() - began
                rest = " ".join(f"{x:.3f}" for x in shown)
                sys.stdout.write(f"step {step}/{steps} {seconds:.0f} s  {rest}\n")
                sys.stdout.flush()

    def _loss(self, batch: Sequence[Chat], num: int) -> tuple[Tensor, list[float]]:
        """Cross entropy with the model's probabilities, and how often both have one favourite."""
        tokens, taps = _padded(batch)
        width = self._norm.numel()
        last = functional.rms_norm(taps[:, 1:, -width:], (width,), self._norm, self._eps)
        rows = functional.embedding(tokens[:, 1:], self._embeddings)
        table = self._table[self._told_apart(tokens)]
        at = _answer_rows(batch)
        with torch.no_grad():
            wanted = functional.linear(last[at], table).softmax(-1)
            favourite = wanted.argmax(-1)
        total, right = torch.zeros(()), []
        for depth, hidden in enumerate(self.head.rollout(taps[:, :-1], rows, num)):
            logits = functional.linear(hidden[at], table)
            total = total + LATER**depth * functional.cross_entropy(logits, wanted)
            right.append((logits.detach().argmax(-1) == favourite).float().mean().item())
        return total, right + [0.0] * (3 - num)

    def _told_apart(self, tokens: Tensor) -> Tensor:
        """Places of the common tokens, and of those that occur here."""
        here = torch.isin(self.target_ids, tokens.unique()).nonzero()[:, 0]
        return torch.cat([self._common, here]).unique()


def _rate(step: int, steps: int) -> float:
    """The learning rate: it rises at first, then falls by half a cosine."""
    fall = 0.51 + 0.49 * math.cos(math.pi * step / steps)
    return RATE * min(1.0, (step + 1) / RISE) * fall


def _batches(chats: Sequence[Chat], seed: int) -> Iterator[Sequence[Chat]]:
    """Steps of chats of about one length, in a random order."""
    rng = random.Random(seed)
    order = list(chats)
    rng.shuffle(order)
    window = 32 * ROWS
    steps = []
    for start in range(0, len(order), window):
        some = sorted(order[start : start + window], key=lambda chat: len(chat[0]))
        steps += [some[at : at + ROWS] for at in range(0, len(some), ROWS)]
    rng.shuffle(steps)
    return iter(steps)


def _padded(batch: Sequence[Chat]) -> tuple[Tensor, Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence([t for t, _, _ in batch], batch_first=True)
    taps = torch.nn.utils.rnn.pad_sequence([r.float() for _, r, _ in batch], batch_first=True)
    return tokens, taps


def _answer_rows(batch: Sequence[Chat]) -> tuple[Tensor, Tensor]:
    """Rows, of those that predict the token after next, whose prediction is of an answer."""
    pairs = [
        (b, t)
        for b, (tokens, _, prompt) in enumerate(batch)
        for t in range(prompt - 1, len(tokens) - 1)
    ]
    rows, columns = zip(*pairs, strict=True)
    return torch.tensor(rows), torch.tensor(columns)


if __name__ == "__main__":
    main()
