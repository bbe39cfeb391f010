"""How the engine speaks with whatever drafts tokens ahead of the model."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence, StepPlan, StepResult


class Drafter(Protocol):
    """Sets `Sequence.drafts`. Drafts are guesses: whatever they are, they change no token.

    One that sets `Sequence.draft_probs` too, for rejection, keeps to what `rejection` asks of it.
    """

    def draft(self, sequences: SequenceOf[Sequence], room: int) -> None:
        """Before a plan: give drafts to some of `sequences`, at most `room` of them in all.

        Each of them lacks one token, holds no drafts, and will get its row in the plan if there
        are blocks.
        """
        ...

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """After how many layers it wants to see the rows of a step; empty: not at all."""
        ...

    def ingest(
        self, plan: StepPlan, batch: StepBatch, taps: torch.Tensor | None, result: StepResult
    ) -> None:
        """A plan, or a part of one, was computed: its rows `[T, taps * D]` where it wanted them."""
        ...

    def computed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """A plan's result is known, and not yet committed; computing it took so long."""
        ...

    def forget(self, generation: str) -> None:
        """An adapter has gone: what was learned of its answers goes too."""
        ...

    def calibrate(self, lengths: SequenceOf[int]) -> None:
        """Have the next steps verify so many drafts each, to learn what steps of a size cost."""
        ...


class NoDrafts:
    """Implements `Drafter` by drafting nothing."""

    def draft(self, sequences: SequenceOf[Sequence], room: int) -> None:
        """See `Drafter.draft`."""

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """See `Drafter.taps`."""
        del plan
        return ()

    def ingest(
        self, plan: StepPlan, batch: StepBatch, taps: torch.Tensor | None, result: StepResult
    ) -> None:
        """See `Drafter.ingest`."""

    def computed(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """See `Drafter.computed`."""

    def forget(self, generation: str) -> None:
        """See `Drafter.forget`."""

    def calibrate(self, lengths: SequenceOf[int]) -> None:
        """See `Drafter.calibrate`."""
