"""Statistics, costs, budget and ledger as one: which drafts does this step verify?

A step goes `begin`, `choose`, then `verified` for each sequence that had rows, then `end`. All
three sides agree on what a row costs and on whose drafts held, because all ask here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from plait.speculative.acceptance import Acceptance, Whose
from plait.speculative.budget import MAX_DRAFT_ROWS, Load, choose, draft_depths, probe
from plait.speculative.cost import StepCost
from plait.speculative.ledger import Ledger
from plait.speculative.source import Draft

PROBE_ROWS = 4
_TIPPING = 1e-3  # of what a whole chain saves, between chains that are worth the same
_FORGOTTEN = 1 / 32  # of the foreseen and taken seconds, by each step


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Drafts for one sequence, of one source or of several one behind the other."""

    whose: Whose
    drafts: tuple[Draft, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all drafts."""
        return sum(len(draft.tokens) for draft in self.drafts)


@dataclass(slots=True)
class _Step:
    load: Load
    token_s: float = 0.0  # what a token takes without drafts
    rows: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)


class Economy:
    """Chooses drafts for a whole batch, and learns from what becomes of them."""

    def __init__(self, cost: StepCost | None = None) -> None:
        self.cost = cost or StepCost()
        self.acceptance = Acceptance()
        self.ledger = Ledger()
        self._step = _Step(Load(num_decoding=0))
        self._foreseen_s = self._taken_s = 0.0  # of the last steps

    @property
    def foreseen_over_taken(self) -> float:
        """Seconds that the last steps should have taken, over those that they took; 0: none yet."""
        return self._foreseen_s / self._taken_s if self._taken_s else 0.0

    def begin(self, load: Load) -> None:
        """A step is about to be planned."""
        self._step = _Step(load)
        self.acceptance.advance()
        if load.num_decoding:
            plain_s = load.plain_seconds(self.cost)
            self._step.token_s = plain_s / load.num_decoding
            self.ledger.begin(plain_s, load.num_decoding)

    def depths(
        self,
        source: str,
        wanted: SequenceOf[tuple[Whose, int]],
        draft_seconds: Callable[[int], float],
        *,
        max_rows: int | None = None,
    ) -> list[int]:
        """How deep a model is to draft for each of `wanted`, a sequence and its limit.

        Not deeper than can be paid. `max_rows`: where all that is drafted will be verified,
        whatever it is. Then at most so many rows, and these can be paid as well.
        """
        if self.ledger.is_asleep(source) or not self._step.load.num_decoding:
            return [0] * len(wanted)
        expected = [self.acceptance.expected(w, source, limit) for w, limit in wanted]
        depths = draft_depths(expected, self._step.load, self.cost, draft_seconds)
        if not any(depths) and self.ledger.is_due(source):
            depths = probe([limit for _, limit in wanted], PROBE_ROWS)
        risk_s = self.ledger.risk_s([source])
        added = [0.0] * (sum(depths) + 1)
        if max_rows is not None:
            added = self._step.load.ladder(self.cost, sum(depths))
        # Cut the deepest until all can be paid.
        while any(depths) and (
            sum(depths) > (max_rows or MAX_DRAFT_ROWS)
            or _drafting(depths, draft_seconds) + added[sum(depths)] > risk_s
        ):
            depths[depths.index(max(depths))] -= 1
        return depths

    def least_reach(
        self,
        source: str,
        depths: SequenceOf[tuple[Whose, int]],
        draft_seconds: Callable[[int], float],
    ) -> float:
        """From which chance of all of a draft on another token is worth drafting and verifying.

        `depths`: of drafts that are made anyway. A token more holds as often as their first does.
        """
        step, num = self._step, len(depths)
        if not num or not step.token_s:
            return 1.0
        chances = [self.acceptance.expected(whose, source, 1)[0] for whose, _ in depths]
        num_rows = sum(depth for _, depth in depths)
        added = step.load.ladder(self.cost, num_rows + num)
        more_s = (added[num_rows + num] - added[num_rows] + draft_seconds(num)) / num
        return more_s / step.token_s / max(sum(chances) / num, 0.01)

    def worth_s(self, survival: SequenceOf[float]) -> float:
        """Seconds that a chain saves, verified as far as that pays; what holds behind tips scales.

        A long chain of which only the first token is worth its row is worth no more than that.
        """
        step = self._step
        best = saved = 0.0
        for survives, added_s in zip(
            survival, step.load.ladder(self.cost, len(survival))[1:], strict=True
        ):
            saved += survives * step.token_s
            best = max(best, saved - added_s)
        return best + _TIPPING * saved

    def taken(self, source: str) -> None:
        """Drafts of a source are verified that `choose` was not asked for."""
        if self.ledger.is_due(source):
            self.ledger.probing(source)

    def choose(self, offers: SequenceOf[Offer], *, max_rows: int = MAX_DRAFT_ROWS) -> list[int]:
        """How many tokens of each offer to verify, at most `max_rows` together."""
        load = self._step.load
        if not offers or not load.num_decoding or max_rows <= 0:
            return [0] * len(offers)
        sources = {draft.source for offer in offers for draft in offer.drafts}
        risk_s = self.ledger.risk_s(sources)
        survivals = [self._survival(offer) for offer in offers]
        counts = choose(survivals, load, self.cost, max_rows=max_rows, max_seconds=risk_s)
        self._probe(offers, counts, max_rows)
        self._limit(offers, counts, sources)
        return counts

    def verified(self, offer: Offer, num_verified: int, num_accepted: int, num_seen: int) -> None:
        """Of an offer `num_verified` tokens had rows and `num_accepted` held.

        `num_seen`: how many were judged; less than accepted and one more where an end, or a
        limit of the request, came before the judgement.
        """
        seen = min(num_seen, num_accepted + 1, num_verified)
        accepted = num_accepted
        step = self._step
        for draft, num in split(offer.drafts, num_verified):
            held = min(accepted, num)
            if seen > 0:
                self.acceptance.observe(offer.whose, draft, held, min(seen, num))
            step.rows[draft.source] = step.rows.get(draft.source, 0) + num
            step.accepted[draft.source] = step.accepted.get(draft.source, 0) + held
            accepted, seen = accepted - held, seen - num

    def end(self, load: Load, num_rows: int, seconds: float) -> None:
        """The step took `seconds` for `num_rows` rows in all, `load` what it was without drafts.

        That may differ from what `begin` was told: a prompt came, a sequence went.
        """
        step = self._step
        num_drafts = sum(step.rows.values())
        row_s = load.ladder(self.cost, num_drafts)[-1] / num_drafts if num_drafts else 0.0
        for source, num in step.rows.items():
            self.ledger.settle(source, num * row_s, step.accepted[source] * step.token_s)
        kind = {
            "adapters": load.adapters,
            "masks": load.masks,
            "prompts": load.num_prompt_rows > 0,
        }
        if num_rows and seconds > 0:
            foreseen_s = self.cost.seconds(num_rows, **kind)
            self._foreseen_s += foreseen_s - _FORGOTTEN * self._foreseen_s
            self._taken_s += seconds - _FORGOTTEN * self._taken_s
        self.cost.measured(num_rows, seconds, **kind)

    def release(self, sequence: Hashable) -> None:
        """The sequence has ended."""
        self.acceptance.release(sequence)

    def forget(self, generation: str) -> None:
        """The adapter is gone."""
        self.acceptance.forget(generation)

    def _survival(self, offer: Offer) -> tuple[float, ...]:
        survival = self.acceptance.survival(offer.whose, offer.drafts[0])
        for draft in offer.drafts[1:]:
            reached = survival[-1] if survival else 1.0
            more = self.acceptance.survival(offer.whose, draft)
            survival += tuple(reached * s for s in more)
        return survival

    def _probe(self, offers: SequenceOf[Offer], counts: list[int], max_rows: int) -> None:
        """Raise `counts` where a source is due that nothing was chosen of, if it can be paid."""
        if not self.ledger.any_due:
            return
        # Only what stands first can be judged whatever becomes of what stands before.
        first = [offer.drafts[0].source for offer in offers]
        for source in sorted(set(first)):
            mine = [i for i, s in enumerate(first) if s == source]
            if not self.ledger.is_due(source) or any(counts[i] for i in mine):
                continue
            left = min(PROBE_ROWS, max_rows - sum(counts))
            wanted = probe([len(offers[i].drafts[0].tokens) for i in mine], left)
            added = self._step.load.ladder(self.cost, sum(counts) + sum(wanted))
            while sum(wanted) and (
                added[sum(counts) + sum(wanted)] - added[sum(counts)] > self.ledger.risk_s([source])
            ):
                wanted[max(i for i, w in enumerate(wanted) if w)] -= 1
            if sum(wanted):
                self.ledger.probing(source)
                for i, num in zip(mine, wanted, strict=True):
                    counts[i] = num

    def _limit(self, offers: SequenceOf[Offer], counts: list[int], sources: set[str]) -> None:
        """Cut `counts` where one source would risk more than it has, though all have enough."""
        num_rows = sum(counts)
        if not num_rows or len(sources) < 2:
            return
        row_s = self._step.load.ladder(self.cost, num_rows)[-1] / num_rows
        if not row_s:
            return
        left = {s: int(self.ledger.risk_s([s]) / row_s + 1e-6) for s in sources}
        for i, offer in enumerate(offers):
            kept = 0
            for draft, num in split(offer.drafts, counts[i]):
                taken = min(num, left[draft.source])
                left[draft.source] -= taken
                kept += taken
                if taken < num:
                    break
            counts[i] = kept


def _drafting(depths: SequenceOf[int], draft_seconds: Callable[[int], float]) -> float:
    """Seconds that drafting so deep takes."""
    active = (sum(d > i for d in depths) for i in range(max(depths, default=0)))
    return sum(map(draft_seconds, active))


def split(drafts: SequenceOf[Draft], count: int) -> list[tuple[Draft, int]]:
    """How many of the first `count` tokens are of each draft, drafts with none left out."""
    parts = []
    for draft in drafts:
        num = min(count, len(draft.tokens))
        if num <= 0:
            break
        parts.append((draft, num))
        count -= num
    return parts
