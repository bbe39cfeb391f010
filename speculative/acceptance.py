"""How likely drafts are to hold: decayed counts, each resting on a wider one where it is thin.

The chance of a draft's token is looked up by where the draft comes from: the generation of the
request's adapter, the source, the source's bucket, the grammar's class, and the depth (or, where
the source tells its own chance of each token, a class of that chance). Each such count rests on
that of the base model, and that on a constant, by `KAPPA` imagined trials. On top, each sequence
has one number per source: its misses over those that the counts let expect. One number learns from
all depths and buckets at once, so that a sequence departs from the crowd after a handful of trials.

Only what was seen counts. A draft behind the first wrong one, or one that a grammar, the budget, a
stop or max_tokens cut away, is no trial: read as a miss, it would switch drafts off near every end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from plait.speculative.source import Draft

DEPTHS = 5  # 1, 2, 3, 4, and all further ones together
CHANCES = 8  # classes of a source's own chance, equally wide
KAPPA = 8.0  # trials that a wider count weighs
FULL_TRIALS = 32  # after which it weighs half of that
HALF_LIFE = 128  # trials of one count
# Of one sequence: long enough to tell chance from change, short enough to follow the text.
SEQUENCE_KAPPA = 2.0  # misses expected
SEQUENCE_HALF_LIFE = 24  # trials
# Counts that nothing adds to fade with the steps, so that what failed once is tried again.
IDLE_HALF_LIFE = 256  # steps
MAX_COUNTS = 1024
MAX_SEQUENCES = 4096
MAX_CHANCE = 0.995

# What a source is believed before any trial, by bucket: the first token of a draft, and at least so
# much each behind it (0: as much as the one before). Those of text are what answers of SmolLM2
# gave (edits, extracts, code, chats).
PRIORS: dict[str, tuple[tuple[float, float], ...]] = {
    "grammar": ((0.9, 0.0),),
    "ngram": ((0.23, 0.55), (0.43, 0.72), (0.75, 0.89), (0.9, 0.93), (0.95, 0.95), (0.97, 0.98)),
    "suffix": ((0.13, 0.5), (0.25, 0.6), (0.59, 0.75), (0.79, 0.85), (0.9, 0.9)),
    "model": ((0.65, 0.0),),
    "eagle": ((0.65, 0.0),),
}
_PRIOR = ((0.5, 0.0),)

_DECAY = 0.5 ** (1 / HALF_LIFE)
_SEQUENCE_DECAY = 0.5 ** (1 / SEQUENCE_HALF_LIFE)
_FADED_EVERY = 32  # steps
_MAX_HAZARD = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Whose:
    """The sequence that a draft is for, and which counts it shares."""

    sequence: Hashable
    generation: str = ""  # of the adapter, several joined by "+"; empty: the base model
    grammar: str = ""  # class of place: "" (no grammar), "string", "structure"


_Key = tuple[str, str, int, str]  # generation, source, bucket, class of grammar


class _Count:
    """Hits and trials by slot: depths, then classes of the source's own chance."""

    __slots__ = ("at", "base", "generation", "hits", "prior", "prior_behind", "trials")

    def __init__(self, key: _Key, base: _Count | None, now: int) -> None:
        self.generation, source, bucket, _ = key
        self.base = base
        self.at = now
        priors = PRIORS.get(source, _PRIOR)
        self.prior, self.prior_behind = priors[min(bucket, len(priors) - 1)]
        self.hits = [0.0] * (DEPTHS + CHANCES)
        self.trials = [0.0] * (DEPTHS + CHANCES)

    def by_depth(self, num: int) -> list[float]:
        """The chance at depths 1 to `num`, of a draft whose earlier tokens held.

        A depth not seen yet is taken for as good as the one before, by as much as the wider
        count lets it: else deep drafts would never be tried, since they do not seem to pay.
        """
        wider = self.base.by_depth(num) if self.base else None
        chances: list[float] = []
        for slot in range(num):
            if not slot:
                prior = wider[0] if wider else self.prior
            elif wider:
                prior = min(max(wider[slot] + chances[-1] - wider[slot - 1], 0.0), 1.0)
            else:
                prior = max(chances[-1], self.prior_behind)
            chances.append(self._rested(slot, prior))
        return chances

    def by_chance(self, slot: int) -> float:
        """The chance of a token in this class of the source's own chance."""
        if self.base:
            return self._rested(slot, self.base.by_chance(slot))
        # A model that draws coupled drafts is often right about tokens that it finds unlikely.
        own = (slot - DEPTHS + 0.5) / CHANCES
        return self._rested(slot, (self.prior + own) / 2)

    def _rested(self, slot: int, prior: float) -> float:
        trials = self.trials[slot]
        # Old counts fade, so trials never grow beyond some 185: with a constant weight of the prior
        # what never fails would never be believed, and in a full batch only that pays.
        weight = KAPPA * FULL_TRIALS / (FULL_TRIALS + trials)
        return (self.hits[slot] + weight * prior) / (trials + weight)

    def add(self, slot: int, hit: bool) -> None:
        self.hits[slot] = self.hits[slot] * _DECAY + hit
        self.trials[slot] = self.trials[slot] * _DECAY + 1

    def fade(self, now: int) -> None:
        age = now - self.at
        if age >= _FADED_EVERY:
            factor = 0.5 ** (age / IDLE_HALF_LIFE)
            self.hits = [h * factor for h in self.hits]
            self.trials = [t * factor for t in self.trials]
            self.at = now


class _Hazard:
    """Misses of one sequence and source, over those expected."""

    __slots__ = ("at", "expected", "misses")

    def __init__(self, now: int) -> None:
        self.at = now
        self.misses = self.expected = 0.0

    def ratio(self) -> float:
        ratio = (self.misses + SEQUENCE_KAPPA) / (self.expected + SEQUENCE_KAPPA)
        return min(ratio, _MAX_HAZARD)

    def add(self, miss: bool, expected: float) -> None:
        self.misses = self.misses * _SEQUENCE_DECAY + miss
        self.expected = self.expected * _SEQUENCE_DECAY + expected

    def fade(self, now: int) -> None:
        age = now - self.at
        if age >= _FADED_EVERY:
            factor = 0.5 ** (age / IDLE_HALF_LIFE)
            self.misses *= factor
            self.expected *= factor
            self.at = now


class Acceptance:
    """Counts of how drafts fared, and the estimates made of them. Bounded; one per engine."""

    def __init__(self) -> None:
        self._now = 0
        self._counts: OrderedDict[_Key, _Count] = OrderedDict()
        self._sequences: OrderedDict[Hashable, dict[str, _Hazard]] = OrderedDict()

    def advance(self) -> None:
        """A step went by."""
        self._now += 1

    def survival(self, whose: Whose, draft: Draft) -> tuple[float, ...]:
        """For each token of `draft` the chance that it and all before it hold."""
        count, ratio = self._count(whose, draft.source, draft.bucket), self._ratio(whose, draft)
        if draft.chances:
            misses = [(1 - count.by_chance(_chance_slot(c))) * ratio for c in draft.chances]
            return _products(misses)
        return _products(_by_depth(count, ratio, len(draft.tokens)))

    def expected(self, whose: Whose, source: str, depth: int) -> tuple[float, ...]:
        """The survival of a draft that is not made yet: `depth` tokens, their chances unknown."""
        hazard = self._sequences.get(whose.sequence, {}).get(source)
        count = self._count(whose, source, 0)
        return _products(_by_depth(count, 1.0 if hazard is None else hazard.ratio(), depth))

    def observe(self, whose: Whose, draft: Draft, num_accepted: int, num_seen: int) -> None:
        """`num_accepted` tokens of `draft` held; whether they would was seen of `num_seen`.

        `num_seen` leaves out what was cut or never verified; behind the first miss nothing counts.
        """
        num_trials = min(num_seen, num_accepted + 1, len(draft.tokens))
        if num_trials <= 0:
            return
        count = self._count(whose, draft.source, draft.bucket)
        hazard = self._hazard(whose, draft.source)
        count.at = hazard.at = self._now
        by_depth = count.by_depth(min(num_trials, DEPTHS))
        for i in range(num_trials):
            hit, slot = i < num_accepted, min(i, DEPTHS - 1)
            chance = by_depth[slot]
            if draft.chances:
                chance_slot = _chance_slot(draft.chances[i])
                chance = count.by_chance(chance_slot)
                count.add(chance_slot, hit)
            hazard.add(not hit, 1 - chance)
            count.add(slot, hit)

    def release(self, sequence: Hashable) -> None:
        """The sequence has ended."""
        self._sequences.pop(sequence, None)

    def forget(self, generation: str) -> None:
        """The adapter is gone; the base model's counts stay."""
        if generation:
            for key in [k for k in self._counts if generation in k[0].split("+")]:
                del self._counts[key]

    def __len__(self) -> int:
        return len(self._counts) + len(self._sequences)

    def _count(self, whose: Whose, source: str, bucket: int) -> _Count:
        key = (whose.generation, source, bucket, whose.grammar)
        count = self._counts.get(key)
        if count is None:
            base = None
            if whose.generation:
                base = self._base(("", source, bucket, whose.grammar))
            count = self._counts[key] = _Count(key, base, self._now)
            while len(self._counts) > MAX_COUNTS:
                self._counts.popitem(last=False)
        else:
            self._counts.move_to_end(key)
            count.fade(self._now)
        return count

    def _base(self, key: _Key) -> _Count:
        base = self._counts.get(key)
        if base is None:
            base = self._counts[key] = _Count(key, None, self._now)
        return base

    def _ratio(self, whose: Whose, draft: Draft) -> float:
        hazards = self._sequences.get(whose.sequence)
        hazard = None if hazards is None else hazards.get(draft.source)
        if hazard is None:
            return 1.0
        hazard.fade(self._now)
        return hazard.ratio()

    def _hazard(self, whose: Whose, source: str) -> _Hazard:
        hazards = self._sequences.get(whose.sequence)
        if hazards is None:
            hazards = self._sequences[whose.sequence] = {}
            if len(self._sequences) > MAX_SEQUENCES:
                self._sequences.popitem(last=False)
        hazard = hazards.get(source)
        if hazard is None:
            hazard = hazards[source] = _Hazard(self._now)
        return hazard


def _by_depth(count: _Count, ratio: float, depth: int) -> list[float]:
    """The chance of a miss at each depth, given that all before held."""
    misses = [(1 - chance) * ratio for chance in count.by_depth(min(depth, DEPTHS))]
    return misses + misses[-1:] * (depth - DEPTHS)


def _products(misses: list[float]) -> tuple[float, ...]:
    survival, products = 1.0, []
    for miss in misses:
        chance = 1.0 - miss
        if chance > MAX_CHANCE:
            chance = MAX_CHANCE
        elif chance < 0.0:
            chance = 0.0
        survival *= chance
        products.append(survival)
    return tuple(products)


def _chance_slot(chance: float) -> int:
    return DEPTHS + min(int(chance * CHANCES), CHANCES - 1)
