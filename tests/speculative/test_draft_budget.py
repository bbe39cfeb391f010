"""The choice of drafts against all others that could have been made."""

from __future__ import annotations

import itertools
import random

import pytest
from support.draft_worlds import STAIRS, one_core, padded

from plait.speculative.budget import Load, choose, draft_depths, probe
from plait.speculative.cost import StepCost


def core_cost() -> StepCost:
    return StepCost({n: one_core(n) for n in (1, 64)})


def stairs_cost() -> StepCost:
    return StepCost({n: padded(n) for n in STAIRS}, stairs=STAIRS)


def rate(chains: list[list[float]], counts: tuple[int, ...], load: Load, cost: StepCost) -> float:
    """Expected tokens per second of this choice."""
    tokens = load.num_decoding + sum(sum(c[:n]) for c, n in zip(chains, counts, strict=True))
    return tokens / (load.plain_seconds(cost) + load.ladder(cost, sum(counts))[-1])


def random_chains(rng: random.Random, num: int) -> list[list[float]]:
    chains = []
    for _ in range(num):
        chance = rng.choice((0.1, 0.5, 0.8, 0.95, rng.random()))
        chains.append([chance**d for d in range(1, rng.randint(1, 5))])
    return chains


@pytest.mark.parametrize("cost", [core_cost(), stairs_cost()], ids=["core", "stairs"])
@pytest.mark.parametrize("num_prompt_rows", [0, 37])
def test_the_choice_is_within_two_hundredths_of_the_best(
    cost: StepCost, num_prompt_rows: int
) -> None:
    rng = random.Random(num_prompt_rows)
    for _ in range(60):
        chains = random_chains(rng, rng.randint(1, 4))
        load = Load(num_decoding=len(chains) + rng.choice((0, 8)), num_prompt_rows=num_prompt_rows)
        every = itertools.product(*(range(len(c) + 1) for c in chains))
        best = max(rate(chains, counts, load, cost) for counts in every)
        chosen = tuple(choose(chains, load, cost))
        assert rate(chains, chosen, load, cost) >= 0.98 * best


def test_certain_drafts_go_first_wherever_they_are() -> None:
    counts = choose([[0.9, 0.85], [0.2], [0.99, 0.97, 0.95]], Load(num_decoding=3), core_cost())
    assert counts == [2, 0, 3]


def test_a_full_batch_verifies_nothing_that_is_not_all_but_certain() -> None:
    load = Load(num_decoding=32)
    assert choose([[0.7]] * 32, load, core_cost()) == [0] * 32
    assert sum(choose([[0.99]] * 32, load, core_cost())) == 32


def test_limits_hold() -> None:
    chains, load = [[0.99] * 8] * 4, Load(num_decoding=4)
    assert sum(choose(chains, load, core_cost(), max_rows=5)) == 5
    assert sum(choose(chains, load, core_cost(), max_seconds=0.012)) == 2
    assert choose(chains, load, core_cost(), max_seconds=0.0) == [0] * 4
    assert choose([], load, core_cost()) == []
    assert choose([[], [0.0]], Load(num_decoding=2), core_cost()) == [0, 0]


def test_rows_that_are_free_are_taken_up_to_the_stair() -> None:
    assert sum(choose([[0.05] * 20], Load(num_decoding=9), stairs_cost())) == 7
    assert choose([[0.05] * 4], Load(num_decoding=8), stairs_cost()) == [0]


def test_rows_of_prompts_do_not_make_drafts_look_free() -> None:
    cost = core_cost()
    for load in (Load(num_decoding=8), Load(num_decoding=8, num_prompt_rows=512)):
        assert choose([[0.5]] * 8, load, cost) == [0] * 8


def test_a_probe_goes_wide_before_deep() -> None:
    assert probe([4, 4, 4], 4) == [2, 1, 1]
    assert probe([4], 4) == [2]
    assert probe([0, 1, 3], 2) == [0, 1, 1]
    assert probe([], 4) == []


def brute_depths(
    expected: list[list[float]], load: Load, cost: StepCost, forward_s: float
) -> float:
    """The best rate of any depths, each depth drafted at once for all that go so deep."""
    best = 0.0
    for depths in itertools.product(*(range(len(e) + 1) for e in expected)):
        spent = max(depths) * forward_s
        best = max(best, _depth_rate(expected, depths, load, cost, spent))
    return best


def _depth_rate(
    expected: list[list[float]], depths: tuple[int, ...], load: Load, cost: StepCost, spent: float
) -> float:
    tokens = load.num_decoding + sum(sum(e[:d]) for e, d in zip(expected, depths, strict=True))
    return tokens / (load.plain_seconds(cost) + load.ladder(cost, sum(depths))[-1] + spent)


def test_drafting_goes_as_deep_as_pays() -> None:
    rng = random.Random(4)
    for _ in range(60):
        expected = random_chains(rng, rng.randint(1, 4))
        load, forward_s = Load(num_decoding=len(expected)), rng.choice((0.001, 0.004, 0.02))
        depths = tuple(draft_depths(expected, load, core_cost(), lambda _, s=forward_s: s))
        spent = max(depths) * forward_s
        reached = _depth_rate(expected, depths, load, core_cost(), spent)
        best = brute_depths(expected, load, core_cost(), forward_s)
        assert reached >= 0.95 * best
        assert reached >= _depth_rate(expected, (0,) * len(expected), load, core_cost(), 0.0)


def test_drafting_that_costs_more_than_it_brings_is_left_alone() -> None:
    load, cost = Load(num_decoding=1), core_cost()
    assert draft_depths([[0.5, 0.25]], load, cost, lambda _: 0.03) == [0]
    assert draft_depths([[0.9, 0.81, 0.73]], load, cost, lambda _: 0.003) == [3]
