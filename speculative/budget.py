"""Which drafts a step verifies, and how deep a model drafts: whatever makes tokens come fastest.

A sequence offers a chain of drafts, each with its survival: the chance that it and all before it
hold. Of all chains together the rows with the greatest survival are taken, which are the beginning
of each chain since survival never grows with depth. How many: as many as make expected tokens per
second greatest, none included. So one sequence may verify ten drafts and its neighbour none, and a
full batch verifies none at all.

Rows of prompts are work that must be done anyway. They make a row more dear or cheap, but their own
time is left out: counted in, it would make any draft look as though it were nearly free.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from plait.speculative.cost import StepCost

MAX_DRAFT_ROWS = 256  # of one step
# Estimates err: what promises less than this over no drafts at all is left alone.
LEAST_GAIN = 1.01
_TIE = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a step computes without drafts."""

    num_decoding: int  # sequences that get one token, one row each
    num_prompt_rows: int = 0
    adapters: bool = False
    masks: bool = False

    def plain_seconds(self, cost: StepCost) -> float:
        """The step without drafts, and without rows of prompts."""
        return cost.seconds(self.num_decoding, adapters=self.adapters, masks=self.masks)

    def ladder(self, cost: StepCost, num_more: int) -> list[float]:
        """Seconds that 0, 1, … `num_more` rows add to the step."""
        kind = {"adapters": self.adapters, "masks": self.masks}
        decoding = cost.ladder(self.num_decoding, num_more, **kind)
        added = [s - decoding[0] for s in decoding]
        if not self.num_prompt_rows:
            return added
        rows = self.num_decoding + self.num_prompt_rows
        mixed = cost.ladder(rows, num_more, prompts=True, **kind)
        # A draft's row is sampled and a prompt's is not: it costs no less than among its like.
        return [max(a, m - mixed[0]) for a, m in zip(added, mixed, strict=True)]


def choose(
    offers: SequenceOf[SequenceOf[float]],
    load: Load,
    cost: StepCost,
    *,
    max_rows: int = MAX_DRAFT_ROWS,
    max_seconds: float | None = None,
) -> list[int]:
    """How many drafts of each offer to verify.

    `offers`: survivals by depth, never growing, one chain for each sequence that has drafts.
    `max_seconds`: what all the rows chosen may add to the step. Ties go to fewer rows.
    """
    survivals = sorted((s for chain in offers for s in chain if s > 0), reverse=True)
    del survivals[max_rows:]
    num = _best(survivals, load, cost, max_seconds)
    if not num:
        return [0] * len(offers)
    least = survivals[num - 1]
    counts = [_num_above(chain, least) for chain in offers]
    ties = num - sum(counts)
    for i, chain in enumerate(offers):
        while ties and counts[i] < len(chain) and chain[counts[i]] == least:
            counts[i] += 1
            ties -= 1
    return counts


def _num_above(chain: SequenceOf[float], least: float) -> int:
    for num, survival in enumerate(chain):
        if survival <= least:
            return num
    return len(chain)


def _best(survivals: list[float], load: Load, cost: StepCost, max_seconds: float | None) -> int:
    """The number of rows, best first, at which tokens per second are the most."""
    if not survivals:
        return 0
    plain, added = load.plain_seconds(cost), load.ladder(cost, len(survivals))
    tokens = float(load.num_decoding)
    best, best_num = tokens / plain * LEAST_GAIN, 0
    for num, survival in enumerate(survivals, start=1):
        if max_seconds is not None and added[num] > max_seconds:
            break
        tokens += survival
        rate = tokens / (plain + added[num])
        if rate > best * _TIE:
            best, best_num = rate, num
    return best_num


def probe(lengths: SequenceOf[int], num_rows: int) -> list[int]:
    """`num_rows` rows to learn from: the first draft of each, then the second, no deeper.

    Breadth learns more than depth: each chain tells as much as holds of it, and one miss more.
    """
    counts = [0] * len(lengths)
    for depth in (1, 2):
        for i, length in enumerate(lengths):
            if num_rows and length >= depth:
                counts[i] = depth
                num_rows -= 1
    return counts


def draft_depths(
    expected: SequenceOf[SequenceOf[float]],
    load: Load,
    cost: StepCost,
    draft_seconds: Callable[[int], float],
) -> list[int]:
    """How deep a model is to draft for each sequence; all zeros where drafting does not pay.

    `expected`: survivals by depth, as far as known before drafting. `draft_seconds`: of one depth
    for so many sequences at once. A depth pays for a sequence if its chance of a token, at the
    present price of one, is worth its share of the drafting and its row. What gets into the next
    depth has paid for this one, so all of it is judged together: the depth at which tokens come
    fastest.
    """
    plain = load.plain_seconds(cost)
    tokens, num_rows, spent = float(load.num_decoding), 0, 0.0
    added = load.ladder(cost, sum(map(len, expected)))
    best, best_depths = tokens / plain * LEAST_GAIN, [0] * len(expected)
    depths, price = [0] * len(expected), plain / max(tokens, 1.0)
    active = list(range(len(expected)))
    for depth in itertools.count():
        chances = {i: expected[i][depth] for i in active if len(expected[i]) > depth}
        active = _paying(chances, price, draft_seconds, added[num_rows:])
        if not active:
            return best_depths
        for i in active:
            depths[i] = depth + 1
            tokens += chances[i]
        num_rows += len(active)
        spent += draft_seconds(len(active))
        rate = tokens / (plain + spent + added[num_rows])
        if rate > best * _TIE:
            best, best_depths, price = rate, list(depths), 1 / rate
    return best_depths


def _paying(
    chances: dict[int, float],
    price: float,
    draft_seconds: Callable[[int], float],
    added: list[float],
) -> list[int]:
    """Those for whom a depth is worth its time. The fewer they are the dearer, so once more."""
    active = list(chances)
    while active:
        num = len(active)
        least = (draft_seconds(num) + added[num] - added[0]) / num / price
        paying = [i for i in active if chances[i] > least]
        if len(paying) == num:
            break
        active = paying
    return active
