"""Train a small ViT with projector, so that a picture is read by the language model as a caption.

Run: python examples/training/train_vision.py [--steps 2451]
The language model is not run. Each of a picture's 16 slots is to say one token of its caption; the
projector's hidden layer has a unit for every token that captions have, and its second matrix holds
their embeddings, so what it gives is what the language model sees of text. While the tower learns
this, half-way up each patch also tells which shapes, digits and letters are in it: without that it
takes many times longer to learn to count and to read. Takes 13 minutes of one core. Writes
platform/demo/parts/vision/model.safetensors; `evaluate_vision.py` then measures. The same seed
gives the same tower on the same machine.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from base_model import PARTS, load
from renders import PATCH, SHAPES, SIZE, WORDS, Drawn, Mark, all_scenes, draw_scene
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

SEED, SEED_OF_PICTURES = 1, 5
ROWS = 64
LEARNING_RATE = 1e-3
WARM_STEPS = 200
COOL_FROM, COOL_TO = 1960, 2800  # steps over which the rate falls to nothing; training ends before
LOUD = 4.0  # what a token's unit gives where its slot says it; the others give 0
MARKED_LAYER = 2
PLAIN_SLOTS = 0.1  # weight of a slot from the ninth on: captions are shorter
FOLDER = PARTS / "vision"
FACTS = json.loads((FOLDER / "config.json").read_text())
CONFIG = CLIPVisionConfig(**FACTS["vision_config"])

TOKENS = tuple(
    dict.fromkeys([all_scenes()[0].slots[-1], *(p for s in all_scenes() for p in s.pieces)])
)
NUMBER_OF = {token: number for number, token in enumerate(TOKENS)}
MARKS = (*SHAPES, *map(str, range(10)), *sorted({letter for word in WORDS for letter in word}))


class Tower(nn.Module):
    """The tower, what reads its slots, and what asks its patches during training."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = CLIPVisionModel(CONFIG)
        self.reader = nn.Linear(CONFIG.hidden_size, len(TOKENS))
        self.marker = nn.Linear(CONFIG.hidden_size, len(MARKS))
        nn.init.normal_(self.tower.embeddings.position_embedding.weight, std=0.3)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Scores `[N, slots, TOKENS]` of what slots say, `[N, slots, MARKS]` of what is there."""
        hidden = self.tower(pixels, output_hidden_states=True).hidden_states
        return self.reader(hidden[-1][:, 1:]), self.marker(hidden[MARKED_LAYER][:, 1:])


def main() -> None:
    """Train, save, say how far it came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2451)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    tower = Tower()
    _train(tower, options.steps)
    model, tokenizer = load()
    table = model.get_input_embeddings().weight.detach()
    ids = [tokenizer(token, add_special_tokens=False).input_ids for token in TOKENS]
    path = FOLDER / "model.safetensors"
    save_file(_parts(tower, table[[one for (one,) in ids]]), path, metadata={"format": "pt"})
    path.chmod(0o644)
    sys.stdout.write(f"saved {path.name}\n")


def _train(tower: Tower, steps: int) -> None:
    optimizer = torch.optim.AdamW(
        tower.parameters(), lr=LEARNING_RATE, weight_decay=0.05, betas=(0.9, 0.98), fused=True
    )
    rng = random.Random(SEED_OF_PICTURES)
    began = time.monotonic()
    right: dict[str, list[bool]] = collections.defaultdict(list)
    for step in range(steps):
        rate = min(1, (step + 1) / WARM_STEPS, (COOL_TO - step) / (COOL_TO - COOL_FROM))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        drawn = [draw_scene(rng) for _ in range(ROWS)]
        loss, hits = _loss(tower, drawn)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for one, hit in zip(drawn, hits, strict=True):
            right[one.scene.kind].append(hit)
        if step % 50 == 0:
            shares = ", ".join(
                f"{kind} {np.mean(all_):.2f}" for kind, all_ in sorted(right.items())
            )
            seconds = time.monotonic() - began
            sys.stdout.write(
                f"step {step}  loss {loss.item():.3f}  right: {shares}  {seconds:.0f} s\n"
            )
            sys.stdout.flush()
            right.clear()


def _loss(tower: Tower, drawn: Sequence[Drawn]) -> tuple[Tensor, list[bool]]:
    """And of each picture, whether all of its slots say the right thing."""
    said, marked = tower(_pixels(drawn))
    wanted = torch.tensor([[NUMBER_OF[token] for token in one.scene.slots] for one in drawn])
    weights = torch.tensor([1.0] * 8 + [PLAIN_SLOTS] * (wanted.shape[1] - 8))
    weights /= weights.sum()
    cross = functional.cross_entropy(said.transpose(1, 2), wanted, reduction="none")
    loud = LOUD * functional.one_hot(wanted, len(TOKENS))
    apart = (functional.gelu(said) - loud).square().sum(-1)
    there = torch.from_numpy(np.stack([_marks(one.marks) for one in drawn]))
    marks = functional.binary_cross_entropy_with_logits(marked, there, pos_weight=torch.tensor(3.0))
    loss = ((cross + 0.03 * apart) * weights).sum(1).mean() + 5.0 * marks
    return loss, (said.argmax(-1) == wanted).all(1).tolist()


def _pixels(drawn: Sequence[Drawn]) -> Tensor:
    """As preprocessor_config.json has them."""
    pixels = torch.from_numpy(np.stack([np.asarray(one.image) for one in drawn]))
    return pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1).contiguous()


def _marks(marks: Sequence[Mark]) -> np.ndarray[Any, np.dtype[np.float32]]:
    side = SIZE // PATCH
    there = np.zeros((side * side, len(MARKS)), np.float32)
    for x, y, name in marks:
        column, row = (min(side - 1, int(at // PATCH)) for at in (x, y))
        there[row * side + column, MARKS.index(name)] = 1
    return there


def _parts(tower: Tower, embeddings: Tensor) -> dict[str, Tensor]:
    """Tower and projector by LLaVA's names, in half precision."""
    width = embeddings.shape[1]
    inner = nn.Linear(CONFIG.hidden_size, width), nn.Linear(width, width)
    with torch.no_grad():
        for linear in inner:
            linear.weight.zero_()
            linear.bias.zero_()
        inner[0].weight[: len(TOKENS)] = tower.reader.weight
        inner[0].bias[: len(TOKENS)] = tower.reader.bias
        inner[1].weight[:, : len(TOKENS)] = embeddings.T / LOUD
    parts = {f"vision_tower.{name}": t for name, t in tower.tower.state_dict().items()}
    for number, linear in enumerate(inner, start=1):
        for name, tensor in linear.state_dict().items():
            parts[f"multi_modal_projector.linear_{number}.{name}"] = tensor
    return {name: t.half().contiguous() for name, t in parts.items()}


if __name__ == "__main__":
    main()
