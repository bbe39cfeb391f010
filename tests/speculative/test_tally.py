"""What is counted of drafts."""

from __future__ import annotations

import pytest

from plait.speculative.source import Draft
from plait.speculative.tally import FORBIDDEN, NOT_WORTH_IT, ROW_CLASSES, Tally

CHAIN = (Draft(tokens=(1, 2, 3), source="grammar"), Draft(tokens=(4, 5), source="ngram"))


@pytest.mark.parametrize(
    ("num_kept", "by_budget"),
    [
        (0, {"grammar": 3, "ngram": 2}),
        (2, {"grammar": 1, "ngram": 2}),
        (3, {"ngram": 2}),
        (4, {"ngram": 1}),
        (5, {}),
        (9, {}),
    ],
)
def test_what_is_cut_counts_for_the_source_that_it_was_of(
    num_kept: int, by_budget: dict[str, int]
) -> None:
    tally = Tally()
    tally.cut(CHAIN, num_kept, by=NOT_WORTH_IT)
    assert tally.figures["draft_cuts"] == {source: (0, num) for source, num in by_budget.items()}
    tally.cut(CHAIN, 4, by=FORBIDDEN)
    assert tally.figures["draft_cuts"]["ngram"][0] == 1


def test_steps_are_counted_by_their_drafts() -> None:
    tally = Tally()
    for num in (0, 0, 1, 3, 4, 128, 129, 500):
        tally.stepped(num)
    counted = dict(zip((*ROW_CLASSES, None), tally.figures["steps_by_drafts"], strict=True))
    assert {most: num for most, num in counted.items() if num} == {
        0: 2,
        1: 1,
        4: 2,
        128: 1,
        None: 2,
    }


def test_seconds_add_up_to_those_of_drafting_and_of_going_along() -> None:
    tally = Tally()
    tally.drafting("ngram", 0.25)
    tally.drafting("model", 1.0)
    tally.choosing(2.0)
    tally.following("eagle", 4.0)
    tally.drafting("ngram", 0.25)
    tally.choosing(0.5)
    assert tally.figures["draft_seconds"] == {
        "ngram": 0.5,
        "model": 1.0,
        "budget": 1.0,
        "eagle": 4.0,
    }
