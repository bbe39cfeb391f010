"""Asking a draft model, or a head, where its drafts promise more than they cost.

Two costs come before the first draft. A draft model that has not computed a sequence's earlier
tokens must catch up; a head must see every row of the target from the prompt on. Both pay later, if
at all, so they are no matter of one step: `Following` says whether they pay at all.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.speculative.cost import StepCost
from plait.speculative.following import Following
from plait.speculative.source import Want

if TYPE_CHECKING:
    import torch

    from plait.platform.batch import StepBatch
    from plait.platform.core import Sequence, StepPlan, StepResult
    from plait.speculative.acceptance import Whose
    from plait.speculative.economy import Economy
    from plait.speculative.source import Draft, ModelSource, TappedSource
    from plait.speculative.tally import Tally

# Rows that a draft model always lags behind: those of drafts of others that held, and the last.
SMALL_LAG = 32
# Tokens that a head may draft beyond what pays on the whole, while it is sure.
MAX_EXTRA = 3

Chain = tuple["Draft", ...]
Promise = Callable[["Whose", Chain], float]  # seconds that drafts are expected to save


@dataclass(frozen=True, slots=True)
class Rival:
    """What the model may be asked, and what it competes with."""

    place: int  # among all that want drafts
    whose: Whose
    want: Want  # behind what is forced
    forced: Chain
    text: Chain  # behind what is forced


class ModelDrafts:
    """One draft model or head of an engine."""

    def __init__(
        self,
        source: ModelSource,
        economy: Economy,
        tally: Tally,
        *,
        head: TappedSource | None = None,
    ) -> None:
        """`head` is `source` where that sees what the target has between its layers."""
        self._source = source
        self._economy = economy
        self._tally = tally
        self._head = head
        self._cost = StepCost()
        self._following = Following()
        self._is_followed: dict[int, bool] = {}  # by the head
        self._invested_s = 0.0  # in this step: going along, or catching up
        self._gained_s = 0.0  # by its drafts, up to the last step
        self._num_judged = 0

    # --- before a plan ---

    def rival(
        self, place: int, whose: Whose, want: Want, forced: Chain, text: Chain
    ) -> Rival | None:
        """What it could be asked in place of `text`; None where it cannot."""
        if want.limit <= 0 or not self._source.takes(want.sequence):
            return None
        lags = self._source.lag(want.sequence) > SMALL_LAG
        if lags and not self._following.takes_on:
            return None
        return Rival(place, whose, want, forced, text)

    def improve(
        self,
        rivals: SequenceOf[Rival],
        chains: list[Chain],
        promise: Promise,
        *,
        max_rows: int | None = None,
    ) -> None:
        """Replace what stands behind forced text in `chains` where the model promises more.

        `max_rows`: as for `Economy.depths`.
        """
        rivals = [rival for rival in rivals if self._may_better(rival, promise)]
        if not rivals:
            return
        name = self._source.name
        depths = self._known(rivals) or self._economy.depths(
            name,
            [(rival.whose, rival.want.limit) for rival in rivals],
            self._cost.seconds,
            max_rows=max_rows,
        )
        asked = [(rival, depth) for rival, depth in zip(rivals, depths, strict=True) if depth]
        if not asked:
            return
        drafts = self._source.propose(self._wants(asked))
        self._book()
        for (rival, _), draft in zip(asked, drafts, strict=True):
            if draft is None or not draft.tokens:
                continue
            if draft.probs:
                # It was drawn, so it must not be left out for what it turned out to be.
                self._economy.taken(name)
                chains[rival.place] = (draft,)
            elif promise(rival.whose, (draft,)) > promise(rival.whose, rival.text):
                chains[rival.place] = (*rival.forced, draft)

    def _may_better(self, rival: Rival, promise: Promise) -> bool:
        """Whether its drafts may save more than what text suggests."""
        if not rival.text or self._knows_first(rival):
            return True
        acceptance, name = self._economy.acceptance, self._source.name
        expected = acceptance.expected(rival.whose, name, rival.want.limit)
        return self._economy.worth_s(expected) > promise(rival.whose, rival.text)

    def _knows_first(self, rival: Rival) -> bool:
        return self._head is not None and self._head.knows_first(rival.want.sequence)

    def _known(self, rivals: SequenceOf[Rival]) -> list[int]:
        """Depths of one where a head knows the first tokens already; empty: ask what pays.

        Whether these pay is judged by their own chances, and so is going on behind them.
        """
        if self._economy.ledger.is_asleep(self._source.name):
            return []
        return [1] * len(rivals) if all(map(self._knows_first, rivals)) else []

    def _wants(self, asked: SequenceOf[tuple[Rival, int]]) -> list[Want]:
        """What to ask for, which may be more than pays on the whole where a head is sure enough."""
        floor = 1.0
        if self._head is not None:
            depths = [(rival.whose, depth) for rival, depth in asked]
            floor = self._economy.least_reach(self._source.name, depths, self._cost.seconds)
        return [
            Want(
                sequence=rival.want.sequence,
                after=rival.want.after,
                limit=depth,
                extra=min(MAX_EXTRA, rival.want.limit - depth) if floor < 1 else 0,
                floor=floor if floor < 1 else 0.0,
            )
            for rival, depth in asked
        ]

    def _book(self) -> None:
        """What the last round took: catching up is an investment, the rest this step's cost."""
        last = self._source.last
        caught_up_s = last.seconds * last.num_catch_up_rows / max(last.num_rows, 1)
        self._invested_s += caught_up_s
        self._economy.ledger.spend(self._source.name, last.seconds - caught_up_s)
        self._tally.drafting(self._source.name, last.seconds)
        self._measure()

    def calibrate(self, want: Want) -> None:
        """Draft for nothing but to learn what it takes."""
        if self._source.takes(want.sequence) and self._source.lag(want.sequence) <= SMALL_LAG:
            self._source.propose([want])
            self._measure()

    def _measure(self) -> None:
        last = self._source.last
        if last.num_forwards and not last.num_catch_up_rows:
            num_rows = round(last.num_rows / last.num_forwards)
            self._cost.measured(num_rows, last.seconds / last.num_forwards)

    # --- while a step is computed ---

    def follows(self, sequence: Sequence) -> bool:
        """Whether the head shall go along with a sequence; not where nobody wants drafts."""
        said = sequence.request.speculation
        if not said.enabled or said.max_tokens == 0:
            return False
        follows = self._is_followed.get(sequence.seq_id)
        if follows is None:
            follows = self._following.takes_on
        elif not self._following.stays:
            follows = False  # for good: the head would lack what it did not see
        self._is_followed[sequence.seq_id] = follows
        return follows

    def taps(self, plan: StepPlan) -> tuple[int, ...]:
        """See `Drafter.taps`."""
        if self._head is None or not self._head.wants_taps(plan):
            return ()
        return self._head.taps

    def ingest(
        self, plan: StepPlan, batch: StepBatch, taps: torch.Tensor | None, result: StepResult
    ) -> float:
        """See `Drafter.ingest`; returns the seconds that it took."""
        if self._head is None:
            return 0.0
        seconds = self._head.ingest(plan, batch, taps, result)
        self._invested_s += seconds
        self._tally.following(self._source.name, seconds)
        return seconds

    # --- after it ---

    def settle(self, seconds: float) -> None:
        """A step took `seconds`; see whether what was invested in it pays."""
        name = self._source.name
        cost_s, earned_s = self._economy.ledger.report().get(name, (0.0, 0.0))
        num_judged = self._tally.num_verified(name)
        self._following.step(
            seconds,
            cost_s=self._invested_s,
            gain_s=earned_s - cost_s - self._gained_s,
            num_judged=num_judged - self._num_judged,
        )
        self._gained_s, self._num_judged = earned_s - cost_s, num_judged
        self._invested_s = 0.0

    def release(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._source.release(sequence)
        self._is_followed.pop(sequence.seq_id, None)
