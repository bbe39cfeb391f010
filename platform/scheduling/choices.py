"""A plan in the making: who computes what within the token budget of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.core import Sequence


@dataclass(slots=True)
class Chosen:
    """What a plan computes of one sequence."""

    sequence: Sequence
    num_tokens: int  # known tokens
    drafts: tuple[int, ...] = ()


@dataclass(slots=True)
class Choices:
    """A plan in the making: rows can still be taken back when a sequence parks or ends."""

    budget: int  # below 0 where the last chosen had to be computed whole
    chosen: dict[int, Chosen] = field(default_factory=dict)
    preempted: dict[int, Sequence] = field(default_factory=dict)
    finished: list[Sequence] = field(default_factory=list)

    def choose(self, sequence: Sequence, num_tokens: int, drafts: tuple[int, ...] = ()) -> None:
        """Compute known tokens of a sequence, and drafts after them."""
        self.chosen[sequence.seq_id] = Chosen(sequence, num_tokens, drafts)
        self.budget -= num_tokens + len(drafts)

    def leaves_out(self, sequence: Sequence) -> bool:
        """Whether known tokens of a running sequence must wait for a later step."""
        chosen = self.chosen.get(sequence.seq_id)
        missing = len(sequence.tokens) - sequence.num_computed_tokens
        return missing > (0 if chosen is None else chosen.num_tokens)

    def park(self, sequence: Sequence) -> None:
        """A sequence lost its place: it gives its rows back."""
        self._take_back(sequence)
        self.preempted[sequence.seq_id] = sequence

    def finish(self, sequence: Sequence) -> None:
        """A sequence ended while planning: it gives its rows back."""
        self._take_back(sequence)
        self.preempted.pop(sequence.seq_id, None)
        self.finished.append(sequence)

    def _take_back(self, sequence: Sequence) -> None:
        chosen = self.chosen.pop(sequence.seq_id, None)
        if chosen is not None:
            self.budget += chosen.num_tokens + len(chosen.drafts)
