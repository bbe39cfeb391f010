"""Drafting whose decisions no clock has a say in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.grammars import WIDTH

from plait.platform.engine import Engine
from plait.speculative.cost import StepCost
from plait.speculative.economy import Economy
from plait.speculative.following import Following
from plait.speculative.source import Sources
from plait.speculative.speculator import Speculator

FREE_ROWS = {1: 1.0, 4096: 1.0}
# As on a CPU: a first row takes as long as six more.
DEAR_ROWS = {1: 1.0, 4096: 1.0 + 4095 / 6}


class FixedCost(StepCost):
    """Steps cost what the profile says, whatever the machine does."""

    def measured(self, *_: Any, **__: Any) -> None:
        """Learn nothing."""


class EagerEconomy(Economy):
    """Has all drafts made and verified, however they fare."""

    def depths(self, source: str, wanted: Any, *_: Any, **__: Any) -> list[int]:
        return [limit for _, limit in wanted]

    def choose(self, offers: Any, *, max_rows: int = 256) -> list[int]:
        counts = []
        for offer in offers:
            counts.append(min(offer.num_tokens, max_rows))
            max_rows -= counts[-1]
        return counts


def speculator(profile: Mapping[int, float] = FREE_ROWS, **sources: Any) -> Speculator:
    return Speculator(
        Economy(FixedCost(profile)), Sources(**sources), max_tokens=16, vocab_size=WIDTH
    )


def set_economy(drafter: Speculator, economy: Economy) -> None:
    drafter._economy = drafter._candidates._economy = economy
    if drafter._model is not None:
        drafter._model._economy = economy


class Always(Following):
    """Goes along, or catches up, with each sequence, whatever that costs."""

    takes_on = stays = True  # type: ignore[assignment]


def draft_whatever_it_costs(engine: Engine) -> Speculator:
    """Have an engine that was started as usual draft as though rows were free."""
    drafter = engine._drafter
    assert isinstance(drafter, Speculator)
    set_economy(drafter, Economy(FixedCost(FREE_ROWS)))
    if drafter._model is not None:
        drafter._model._following = Always()
    return drafter


def verified(stats: Any, source: str) -> int:
    return stats.drafts.get(source, (0, 0))[0]


def accepted(stats: Any, source: str) -> int:
    return stats.drafts.get(source, (0, 0))[1]
