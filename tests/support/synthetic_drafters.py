"""Draft models that are right as often as a test wants. They implement `source.ModelSource`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import islice

from plait.platform.core import Sequence
from plait.speculative.source import Draft, Round, Want

Answers = Mapping[tuple[str, int], SequenceOf[int]]  # (request id, index) → the whole output


class SyntheticDrafter:
    """Drafts by a rule: the sequence, the place in its output, what is right there → a token."""

    name = "model"

    def __init__(
        self,
        answers: Answers,
        rule: Callable[[Sequence, int, int | None], int | None],
        *,
        seconds: float = 0.0,
    ) -> None:
        self._answers = answers
        self._rule = rule
        self._seconds = seconds
        self.last = Round()
        self.num_asked = 0
        self.following: set[int] = set()

    def takes(self, sequence: Sequence) -> bool:
        del sequence
        return True

    def lag(self, sequence: Sequence) -> int:
        del sequence
        return 0

    def propose(self, wants: SequenceOf[Want]) -> list[Draft | None]:
        depth = max(want.limit for want in wants)
        self.last = Round(seconds=self._seconds * depth, num_forwards=depth, num_rows=depth)
        self.num_asked += len(wants)
        self.following |= {want.sequence.seq_id for want in wants}
        return [self._draft(want) for want in wants]

    def _draft(self, want: Want) -> Draft | None:
        tokens = tuple(islice(self._tokens(want), want.limit))
        return Draft(tokens=tokens, source=self.name) if tokens else None

    def _tokens(self, want: Want) -> Iterator[int]:
        sequence = want.sequence
        answer = self._answers.get((sequence.request.request_id, sequence.index), ())
        place = sequence.num_output_tokens + len(want.after)
        while True:
            right = answer[place] if place < len(answer) else None
            token = self._rule(sequence, place, right)
            if token is None:
                return
            yield token
            place += 1

    def release(self, sequence: Sequence) -> None:
        self.following.discard(sequence.seq_id)


def oracle(answers: Answers, **more: float) -> SyntheticDrafter:
    """Always right."""
    return SyntheticDrafter(answers, lambda _sequence, _place, right: right, **more)


def adversary(answers: Answers, ids: SequenceOf[int], **more: float) -> SyntheticDrafter:
    """Never right, with `ids` in turn: end tokens, specials, what no vocabulary has."""

    def wrong(_sequence: Sequence, place: int, right: int | None) -> int:
        token = ids[place % len(ids)]
        return token if token != right else ids[(place + 1) % len(ids)]

    return SyntheticDrafter(answers, wrong, **more)


def sometimes(answers: Answers, rate: float, num_tokens: int, **more: float) -> SyntheticDrafter:
    """Right at a share of places, drawn once for each."""

    def rule(sequence: Sequence, place: int, right: int | None) -> int:
        rng = random.Random(f"{sequence.request.request_id}/{sequence.index}/{place}")
        if right is not None and rng.random() < rate:
            return right
        return (rng.randrange(num_tokens - 1) + (right or 0) + 1) % num_tokens

    return SyntheticDrafter(answers, rule, **more)
