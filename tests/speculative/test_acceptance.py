"""Statistics of drafts: what counts, what it rests on, and how fast it follows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.speculative import acceptance
from plait.speculative.acceptance import MAX_CHANCE, PRIORS, Acceptance, Whose
from plait.speculative.source import Draft


def draft(num: int = 4, source: str = "model", bucket: int = 0, **more: tuple[float, ...]) -> Draft:
    return Draft(tokens=(0,) * num, source=source, bucket=bucket, **more)


def seen(
    stats: Acceptance, chance: float, num: int, sequence: int = 1, generation: str = ""
) -> None:
    """`num` drafts of four tokens, each of which holds with this chance."""
    rng = random.Random(num)
    for _ in range(num):
        held = 0
        while held < 4 and rng.random() < chance:
            held += 1
        stats.observe(Whose(sequence=sequence, generation=generation), draft(), held, 4)


def first(stats: Acceptance, sequence: int = 1, generation: str = "", **kind: int) -> float:
    return stats.survival(Whose(sequence=sequence, generation=generation), draft(**kind))[0]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=60),
    st.integers(1, 16),
    st.booleans(),
)
def test_survival_is_a_chance_and_never_grows(
    trials: list[tuple[int, int]], num: int, with_chances: bool
) -> None:
    stats, whose = Acceptance(), Whose(sequence=1, generation="a")
    offered = draft(num, chances=tuple(0.9 for _ in range(num)) if with_chances else ())
    for held, num_seen in trials:
        stats.observe(whose, offered, held, num_seen)
    survival = stats.survival(whose, offered)
    assert len(survival) == num
    assert sorted(survival, reverse=True) == list(survival)
    assert all(0 <= s <= MAX_CHANCE for s in survival)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.8, 0.97])
def test_the_true_chance_is_found(chance: float) -> None:
    stats = Acceptance()
    seen(stats, chance, 400)
    # A sequence follows its own last trials, two dozen of them; others take what all together gave.
    assert first(stats) == pytest.approx(chance, abs=0.15)
    assert first(stats, sequence=2) == pytest.approx(chance, abs=0.1)


def test_what_was_cut_is_no_trial() -> None:
    stats = Acceptance()
    before = first(stats)
    for _ in range(50):
        stats.observe(Whose(sequence=1), draft(), 0, 0)
    assert first(stats) == before
    for _ in range(50):
        stats.observe(Whose(sequence=1), draft(), 2, 2)  # cut behind two that held
    assert stats.survival(Whose(sequence=1), draft())[3] > 0.8


def test_nothing_behind_the_first_miss_counts() -> None:
    one, all_seen = Acceptance(), Acceptance()
    for _ in range(20):
        one.observe(Whose(sequence=1), draft(), 1, 2)
        all_seen.observe(Whose(sequence=1), draft(), 1, 4)
    whose = Whose(sequence=1)
    assert one.survival(whose, draft()) == all_seen.survival(whose, draft())


def test_a_sequence_departs_from_the_crowd_within_a_few_trials() -> None:
    stats = Acceptance()
    seen(stats, 0.2, 300, sequence=1)
    for _ in range(6):
        stats.observe(Whose(sequence=2), draft(), 4, 4)
    assert first(stats, sequence=2) > 0.7 > 0.4 > first(stats, sequence=3)


def test_an_adapter_rests_on_the_base_model_and_departs_from_it() -> None:
    stats = Acceptance()
    seen(stats, 0.9, 300)
    assert first(stats, sequence=2, generation="a") > 0.8
    seen(stats, 0.1, 100, sequence=3, generation="a")
    assert first(stats, sequence=4, generation="a") < 0.3
    assert first(stats, sequence=5, generation="b") > 0.8
    stats.forget("a")
    assert first(stats, sequence=6, generation="a") > 0.8


def test_buckets_and_places_in_a_grammar_count_alone() -> None:
    stats = Acceptance()
    seen(stats, 0.0, 100)
    assert first(stats, sequence=2) < 0.1
    assert first(stats, sequence=2, bucket=3) == PRIORS["model"][0][0]
    place = Whose(sequence=2, grammar="string")
    assert stats.survival(place, draft())[0] == PRIORS["model"][0][0]


def test_a_sources_own_chances_are_put_right() -> None:
    """It says 0.95 where it is right half the time, and 0.3 where it is right always."""
    stats, rng = Acceptance(), random.Random(3)
    for i in range(400):
        offered = draft(1, "model", chances=(0.3 if i % 2 else 0.95,))
        held = 1 if i % 2 else int(rng.random() < 0.5)
        stats.observe(Whose(sequence=i), offered, held, 1)
    sure = stats.survival(Whose(sequence=-1), draft(1, "model", chances=(0.95,)))[0]
    unsure = stats.survival(Whose(sequence=-1), draft(1, "model", chances=(0.3,)))[0]
    assert sure == pytest.approx(0.5, abs=0.12)
    assert unsure > 0.9
    assert stats.expected(Whose(sequence=-1), "model", 1)[0] == pytest.approx(0.75, abs=0.1)


def test_what_nobody_tries_any_more_is_forgotten_slowly() -> None:
    stats = Acceptance()
    seen(stats, 0.0, 200)
    low = first(stats)
    for _ in range(2500):
        stats.advance()
    assert low < 0.05 < 0.4 < first(stats)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "MAX_COUNTS", 20)
    monkeypatch.setattr(acceptance, "MAX_SEQUENCES", 10)
    stats = Acceptance()
    for i in range(200):
        stats.observe(Whose(sequence=i, generation=f"g{i}"), draft(bucket=i), 1, 2)
        assert len(stats) <= 30
    stats = Acceptance()
    stats.observe(Whose(sequence=1), draft(), 1, 2)
    stats.release(1)
    assert len(stats) == 1
