"""What draft sources and those who choose among them exchange."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence, StepPlan, StepResult
    from plait.speculative.rejection import Distribution


MAX_FAULTS = 3  # of a model, one after another, until it is left alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Tokens that may follow a sequence, all from one source."""

    tokens: tuple[int, ...]
    source: str  # "grammar" | "ngram" | "suffix" | "model" | "eagle"
    bucket: int = 0  # the source's class of confidence; how drafts fare is counted for each alone
    # The source's own estimate of each token's chance, given those before it; empty: it has none.
    chances: tuple[float, ...] = ()
    # What each token was drawn from, where rejection sampling is to verify them; else empty. Then
    # the draft is taken whole or not at all, and for reasons that do not look at its tokens.
    probs: tuple[Distribution, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A sequence for which drafts are wanted."""

    sequence: Sequence
    after: tuple[int, ...] = ()  # drafts that are there already; more are to go on behind them
    limit: int  # at most so many, those in `after` not counted
    # So many more while the chance of all so far is no less than `floor`, for a source that has
    # chances; others leave it.
    extra: int = 0
    floor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What it took a model to draft once, for however many sequences."""

    seconds: float = 0.0
    num_forwards: int = 0
    num_rows: int = 0
    num_catch_up_rows: int = 0  # of these, tokens that were verified before the last step


class TextSource(Protocol):
    """Drafts from text alone, in microseconds. Called by the engine's thread."""

    name: str  # the source of its drafts

    def propose(self, want: Want) -> Draft | None:
        """The continuation that the source holds for the most likely, or None."""
        ...

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended: learn from it what is worth it, and forget it."""
        ...

    def forget(self, generation: str) -> None:
        """An adapter has gone: forget the answers that it gave."""
        ...


class Constraints(Protocol):
    """What grammars say of drafts. Implemented by `structured.strand.GrammarStrand`."""

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        """Tokens of the text that must follow, at most `limit`."""
        ...

    def count_legal(self, sequence: Sequence, drafts: SequenceOf[int]) -> int:
        """How many of `drafts` may follow, one behind the other."""
        ...


class ModelSource(Protocol):
    """Drafts from a model of its own, for many sequences at once. Called by the engine's thread."""

    name: str  # the source of its drafts
    last: Round  # what the last `propose` took

    def takes(self, sequence: Sequence) -> bool:
        """Whether it can draft for a sequence at all now."""
        ...

    def lag(self, sequence: Sequence) -> int:
        """Rows that it must compute before the first draft, beside the sequence's last token."""
        ...

    def propose(self, wants: SequenceOf[Want]) -> list[Draft | None]:
        """One draft for each of `wants`, in their order."""
        ...

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended: forget it."""
        ...


class TappedSource(ModelSource, Protocol):
    """A model that drafts from what the target has between its layers."""

    taps: tuple[int, ...]  # after how many layers

    def knows_first(self, sequence: Sequence) -> bool:
        """Whether the first token of a draft is there already, and costs nothing more."""
        ...

    def wants_taps(self, plan: StepPlan) -> bool:
        """Whether it goes along with a sequence of this step."""
        ...

    def ingest(
        self, plan: StepPlan, batch: StepBatch, taps: torch.Tensor | None, result: StepResult
    ) -> float:
        """Take in a step, or a part of one; returns the seconds that it took.

        `taps`: `[T, len(taps) * D]`, None where the step was computed without.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where an engine's drafts come from; each may be missing. Of model and head there is one."""

    constraints: Constraints | None = None
    texts: tuple[TextSource, ...] = ()
    model: ModelSource | None = None
    head: TappedSource | None = None
