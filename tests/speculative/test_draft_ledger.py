"""Never slower: what speculation may lose, and that it comes back when it is worth it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.draft_worlds import World, one_core, padded

from plait.speculative.acceptance import Whose
from plait.speculative.budget import Load
from plait.speculative.cost import StepCost
from plait.speculative.economy import Economy, Offer
from plait.speculative.ledger import FIRST_PROBE, NEXT_PROBE, Ledger
from plait.speculative.source import Draft

# 64 steps of a few milliseconds of luck: each claim stands for so many seeds.
SEEDS = range(4)


def never(*_: int) -> float:
    return 0.0


def always(*_: int) -> float:
    return 1.0


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("seconds", [one_core, padded])
@pytest.mark.parametrize("profile", [True, False])
@pytest.mark.parametrize("source", ["ngram", "grammar"])
def test_useless_drafts_cost_less_than_two_hundredths(
    batch: int, seconds: Callable[[int], float], profile: bool, source: str
) -> None:
    for seed in SEEDS if batch < 32 else SEEDS[:2]:
        world = World(never, batch, seconds, profile=profile, source=source, seed=seed)
        assert world.run(64) > 0.98
        assert world.run(100) > 0.985


@pytest.mark.parametrize("batch", [1, 8])
def test_useless_drafts_of_a_model_cost_less_than_two_hundredths(batch: int) -> None:
    for seed in SEEDS:
        world = World(never, batch, source="model", draft_s=0.005, seed=seed)
        assert world.run(64) > 0.98
        assert world.run(200) > 0.985


@pytest.mark.parametrize("life", [20, 60])
def test_useless_drafts_of_ever_new_sequences_cost_as_little(life: int) -> None:
    for batch in (1, 8, 32):
        assert World(never, batch, life=life).run(400) > 0.98


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("seconds", [one_core, padded])
def test_perfect_drafts_reach_nearly_what_is_possible(
    batch: int, seconds: Callable[[int], float]
) -> None:
    world = World(always, batch, seconds)
    world.run(64)
    assert world.run(200) >= 0.97 * world.best(1.0)


@pytest.mark.parametrize(("batch", "chance"), [(1, 0.5), (1, 0.8), (8, 0.5), (8, 0.9), (32, 0.8)])
def test_drafts_between_are_near_the_best_and_never_slower(batch: int, chance: float) -> None:
    rates = []
    for seed in SEEDS:
        world = World(lambda *_: chance, batch, seed=seed)
        assert world.run(64) > 0.98
        rates.append(world.run(300))
        assert rates[-1] > 0.98
    assert sum(rates) / len(rates) >= 0.93 * world.best(chance)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_a_source_that_becomes_useful_is_found_and_one_that_ceases_is_dropped(batch: int) -> None:
    for seed in SEEDS[: 4 if batch == 1 else 1]:
        world = World(lambda step, *_: float(400 <= step < 1000), batch, seed=seed)
        assert world.run(400) > 0.98
        world.run(300)
        assert world.run(300) >= 0.95 * world.best(1.0)
        assert world.run(64) > 0.9  # it may lose of what it earned, and that soon ends
        assert world.run(400) > 0.98


def test_good_neighbours_do_not_pay_for_bad_ones() -> None:
    """Half of the sequences hold every draft and half none."""
    world = World(lambda step, sequence, depth: float(sequence % 2), 8)
    world.run(100)
    # Four perfect chains of four in a batch of eight.
    best = (8 + 16) / one_core(8 + 16) / (8 / one_core(8))
    assert world.run(200) >= 0.95 * best


def test_probes_come_after_eight_steps_then_64_or_when_the_load_halves() -> None:
    ledger, probed, asleep = Ledger(), [], []
    ledger.begin(0.05, 16)
    ledger.settle("ngram", 0.01, 0.0)  # chosen, and wrong
    for step in range(1, 140):
        ledger.begin(0.05, 16)
        if ledger.is_asleep("ngram"):
            asleep.append(step)
        if ledger.is_due("ngram"):
            ledger.probing("ngram")
            ledger.settle("ngram", 0.01, 0.0)
            probed.append(step)
    assert probed == [FIRST_PROBE, FIRST_PROBE + NEXT_PROBE, FIRST_PROBE + 2 * NEXT_PROBE]
    assert asleep[0] == 2 * FIRST_PROBE
    assert not {*asleep} & {*probed}
    ledger.begin(0.05, 8)
    assert ledger.is_due("ngram")


def test_winnings_may_be_lost_again_and_nothing_beyond_the_allowance() -> None:
    ledger = Ledger()
    ledger.begin(1.0, 1)
    start = ledger.risk_s(["a", "b"])
    assert start == pytest.approx(0.51)
    ledger.settle("a", 0.5, 2.5)
    assert ledger.risk_s(["a"]) == pytest.approx(start + 2)
    assert ledger.risk_s(["b"]) == pytest.approx(start)
    ledger.settle("b", 0.6, 0.0)
    assert ledger.risk_s(["b"]) == 0
    assert ledger.risk_s(["a"]) == pytest.approx(2)
    assert ledger.report() == {"a": (0.5, 2.5), "b": (0.6, 0.0)}


def test_forced_text_does_not_wait_for_what_other_sources_lost() -> None:
    """The first draft of a cold model took more than a step, and a hundred steps had none."""
    economy, load = Economy(), Load(num_decoding=1, adapters=True, masks=True)
    forced = Draft(tokens=(1, 2), source="grammar")
    model = Draft(tokens=(3, 4), source="eagle")
    whose = Whose(sequence=1, grammar="structure")
    economy.begin(load)
    economy.ledger.spend("eagle", 2 * load.plain_seconds(economy.cost))
    for offered, wanted in (((forced,), True), ((forced, model), True), ((model,), False)):
        offer = Offer(whose=whose, drafts=offered)
        economy.begin(load)
        (count,) = economy.choose([offer])
        assert bool(count) == wanted
        assert count <= 2  # what stands behind is the model's
        economy.verified(offer, count, count, count)
        economy.end(load, 1 + count, economy.cost.seconds(1 + count))


def test_lost_forced_text_is_not_paid_by_others() -> None:
    ledger = Ledger()
    ledger.begin(1.0, 1)
    assert ledger.risk_s(["grammar"]) == ledger.risk_s(["a"]) == pytest.approx(0.51)
    assert ledger.risk_s(["grammar", "a", "b"]) == pytest.approx(1.02)
    ledger.settle("grammar", 0.6, 0.0)
    assert ledger.risk_s(["grammar"]) == 0
    assert ledger.risk_s(["a"]) == pytest.approx(0.51)


def test_drafts_behind_one_another_are_told_apart() -> None:
    economy = Economy(StepCost({1: 0.01, 64: 0.011}))
    forced = Draft(tokens=(1, 2), source="grammar")
    offer = Offer(whose=Whose(sequence=1), drafts=(forced, Draft(tokens=(3, 4), source="ngram")))
    for _ in range(30):
        economy.begin(Load(num_decoding=1))
        (count,) = economy.choose([offer])
        economy.verified(offer, count, min(count, 2), count)
        economy.end(Load(num_decoding=1), 1 + count, 0.01)
    assert economy.acceptance.survival(offer.whose, forced)[1] > 0.9
    assert economy.acceptance.survival(offer.whose, offer.drafts[1])[0] < 0.4


@pytest.mark.parametrize(("batch", "limit_s"), [(1, 50e-6), (64, 1e-3)])
def test_the_books_are_kept_in_microseconds(batch: int, limit_s: float) -> None:
    """The processor's time of the quickest of many steps: a test machine is busy."""
    world = World(lambda step, sequence, depth: 0.9, batch, padded)
    world.run(50)
    economy, load = world.economy, Load(num_decoding=batch)
    offers = world._offers()
    quickest = 1.0
    for _ in range(300):
        begin = time.perf_counter()
        economy.begin(load)
        counts = economy.choose(offers)
        for offer, count in zip(offers, counts, strict=True):
            economy.verified(offer, count, min(count, 2), count)
        economy.end(load, batch + sum(counts), 0.01)
        quickest = min(quickest, time.perf_counter() - begin)
    assert quickest < 2 * limit_s
