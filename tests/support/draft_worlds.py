"""A simulated engine for the economy of drafts: true costs and true chances, which it must find."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from plait.speculative.acceptance import Whose
from plait.speculative.budget import Load
from plait.speculative.cost import StepCost
from plait.speculative.economy import Economy, Offer
from plait.speculative.source import Draft


def one_core(rows: int) -> float:
    """SmolLM2 in bf16 on one core: 36 ms, and 5.5 ms for each row more."""
    return 0.036 + 0.0055 * (rows - 1)


def padded(rows: int) -> float:
    """A GPU that pads to captured sizes: rows are free until the next stair."""
    stair = next(s for s in STAIRS if s >= rows)
    return 0.010 + 0.00006 * stair


STAIRS = (1, 2, 4, *range(8, 257, 8), 320, 384, 448, 512)


@dataclass
class World:
    """`chance(step, sequence, depth)` is the true one of the drafts of `source`."""

    chance: Callable[[int, int, int], float]
    num_sequences: int
    seconds: Callable[[int], float] = one_core
    source: str = "model"
    num_drafts: int = 4
    profile: bool = True
    noise: float = 0.08  # of the logarithm of a step's measured time
    outliers: float = 0.02  # share of steps measured at ten times their time
    draft_s: float = 0.0  # one depth of drafting for the batch
    life: int = 10**9  # steps after which a sequence gives way to a new one
    seed: int = 0
    elapsed_s: float = field(default=0.0, init=False)
    num_tokens: int = field(default=0, init=False)
    num_steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        stairs = STAIRS if self.seconds is padded else ()
        sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
        profile = {n: self.seconds(n) for n in sizes} if self.profile else None
        self.economy = Economy(StepCost(profile, stairs=stairs))

    def run(self, num_steps: int) -> float:
        """Tokens per second over these steps, in those that no drafts would give."""
        before = self.elapsed_s, self.num_tokens
        for _ in range(num_steps):
            self.step()
        rate = (self.num_tokens - before[1]) / (self.elapsed_s - before[0])
        return rate / (self.num_sequences / self.seconds(self.num_sequences))

    def step(self) -> None:
        economy, step = self.economy, self.num_steps
        load = Load(num_decoding=self.num_sequences)
        economy.begin(load)
        offers = self._offers()
        counts = economy.choose(offers)
        for sequence, (offer, count) in enumerate(zip(offers, counts, strict=True)):
            held = 0
            while held < count and self.random.random() < self.chance(step, sequence, held + 1):
                held += 1
            self.num_tokens += 1 + held
            if count:
                economy.verified(offer, count, held, count)
        if len(offers) < self.num_sequences:
            self.num_tokens += self.num_sequences - len(offers)
        rows = self.num_sequences + sum(counts)
        seconds = self.seconds(rows)
        self.elapsed_s += seconds
        measured = seconds * self.random.lognormvariate(0, self.noise)
        if self.random.random() < self.outliers:
            measured *= 10
        economy.end(load, rows, measured)
        self.num_steps += 1

    def _offers(self) -> list[Offer]:
        depths = [self.num_drafts] * self.num_sequences
        names = [(s, (self.num_steps + 7 * s) // self.life) for s in range(self.num_sequences)]
        whose = [Whose(sequence=name) for name in names]
        if self.draft_s:
            depths = self.economy.depths(
                self.source, [(w, self.num_drafts) for w in whose], lambda num: self.draft_s
            )
            drafting_s = max(depths) * self.draft_s
            self.elapsed_s += drafting_s
            if drafting_s:
                self.economy.ledger.spend(self.source, drafting_s)
        return [
            Offer(whose=w, drafts=(Draft(tokens=(0,) * depth, source=self.source),))
            for w, depth in zip(whose, depths, strict=True)
            if depth
        ]

    def best(self, chance: float) -> float:
        """The most that any fixed choice gives where all drafts hold with this chance."""
        plain = self.num_sequences / self.seconds(self.num_sequences)
        survivals = [chance**d for d in range(1, self.num_drafts + 1)]
        most, tokens, rows = 1.0, float(self.num_sequences), self.num_sequences
        for survival in survivals:
            for _ in range(self.num_sequences):
                tokens, rows = tokens + survival, rows + 1
                spent = self.seconds(rows)
                if self.draft_s:
                    spent += self.draft_s * (1 + survivals.index(survival))
                most = max(most, tokens / spent / plain)
        return most
