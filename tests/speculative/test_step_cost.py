"""The cost of steps: found through noise, outliers and slow spells, and safe where unknown."""

from __future__ import annotations

import random

import pytest
from support.draft_worlds import one_core, padded

from plait.speculative.cost import UNKNOWN_SLOPE, StepCost

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def feed(cost: StepCost, sizes: list[int], slow: float = 1.0, seed: int = 0, **kind: bool) -> None:
    """Steps of these sizes, measured with noise and one in twenty ten times too long."""
    chance = random.Random(seed)
    for rows in sizes:
        seconds = one_core(rows) * slow * chance.lognormvariate(0, 0.08)
        cost.measured(rows, seconds * (10 if chance.random() < 0.05 else 1), **kind)


def test_a_profile_is_believed_between_and_beyond_its_sizes() -> None:
    cost = StepCost({n: one_core(n) for n in SIZES})
    for rows in (1, 3, 12, 100, 300, 5000):
        assert cost.seconds(rows) == pytest.approx(one_core(rows), rel=0.01)


def test_costs_are_found_without_a_profile() -> None:
    cost, chance = StepCost(), random.Random(1)
    feed(cost, [chance.choice((1, 2, 3, 5, 9)) for _ in range(300)])
    for rows in (1, 2, 3, 5, 7, 9, 16):
        assert cost.seconds(rows) == pytest.approx(one_core(rows), rel=0.15)


def test_rows_are_dear_before_anything_is_known() -> None:
    cost = StepCost()
    cost.measured(1, 0.05)
    assert cost.seconds(1) == pytest.approx(0.05)
    assert cost.seconds(5) == pytest.approx(0.05 * (1 + 4 * UNKNOWN_SLOPE))


def test_a_slow_spell_makes_no_other_size_look_cheap() -> None:
    cost = StepCost({n: one_core(n) for n in SIZES})
    feed(cost, [1] * 200, slow=2.5)
    assert cost.seconds(1) == pytest.approx(2.5 * one_core(1), rel=0.15)
    assert cost.seconds(5) / cost.seconds(1) == pytest.approx(one_core(5) / one_core(1), rel=0.02)
    feed(cost, [1] * 20)
    assert cost.seconds(1) == pytest.approx(one_core(1), rel=0.15)


def test_one_outlier_changes_next_to_nothing() -> None:
    cost = StepCost({n: one_core(n) for n in SIZES})
    cost.measured(1, 10 * one_core(1))
    feed(cost, [1, 4] * 30)
    before = cost.ladder(1, 8)
    cost.measured(4, 100 * one_core(4))
    assert cost.ladder(1, 8) == pytest.approx(before, rel=0.05)


def test_a_wrong_curve_is_put_right_where_steps_went() -> None:
    cost, chance = StepCost(dict.fromkeys(SIZES, 0.036)), random.Random(2)
    feed(cost, [chance.choice((1, 5, 9)) for _ in range(300)])
    assert cost.seconds(9) / cost.seconds(1) == pytest.approx(one_core(9) / one_core(1), rel=0.12)


def test_rows_of_one_stair_are_free() -> None:
    stairs = (1, 8, 16)
    cost = StepCost({n: padded(n) for n in stairs}, stairs=stairs)
    ladder = cost.ladder(2, 14)
    assert ladder[0] == ladder[6] < ladder[7] == ladder[14]


def test_costs_never_fall_with_rows() -> None:
    cost = StepCost()
    for rows, seconds in ((1, 0.1), (8, 0.05), (4, 0.01), (64, 0.02), (1, 0.3)):
        cost.measured(rows, seconds)
    ladder = cost.ladder(1, 200)
    assert ladder == sorted(ladder)


def test_kinds_of_steps_have_costs_of_their_own() -> None:
    cost = StepCost({n: one_core(n) for n in SIZES})
    assert cost.seconds(4, adapters=True) == cost.seconds(4)
    for i in range(400):
        with_adapters = bool(i % 2)
        cost.measured(4, one_core(4) * (1.3 if with_adapters else 1.0), adapters=with_adapters)
    assert cost.seconds(4, adapters=True) / cost.seconds(4) == pytest.approx(1.3, rel=0.04)
    assert cost.seconds(4, adapters=True, masks=True) == cost.seconds(4, adapters=True)


def test_nonsense_is_no_measurement() -> None:
    cost = StepCost({1: 0.036})
    for rows, seconds in ((0, 1.0), (1, 0.0), (1, float("nan")), (1, float("inf"))):
        cost.measured(rows, seconds)
    assert cost.seconds(1) == 0.036
