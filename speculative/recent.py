"""Drafts from answers that have ended: for formats and phrases that come again and again.

Answers are kept apart by tenant, cache salt and adapters, since an accepted draft is quicker than
none and so tells of the text it came from. Where the end of a sequence occurred in recent answers
of its kind, the most frequent continuation is proposed, as far as the product of its frequencies
stays above `FLOOR` (after ArcticInference's suffix decoding).

Bounded by tokens (28 bytes each at most, so 7 MB by default) and by kinds, of which the least
recently used falls out first; in a kind the oldest answers do. An answer costs some 0.3 µs a token
as it ends, a proposal 10 to 60 µs (one busy core), 2 µs where its kind has no answers yet.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from plait.speculative.copying import bucket, num_ids, readable, voted
from plait.speculative.occurrences import BARRIER, LONGEST, Match, Occurrences
from plait.speculative.source import Draft, Want

if TYPE_CHECKING:
    from plait.platform.core import Request, Sequence

SOURCE = "suffix"
FLOOR = 0.2  # of a chain's estimated chance
VOTERS = 16  # occurrences that are asked
PROMPT_TAIL = 4  # tokens of the prompt kept before an answer: they tell where answers begin
MIN_ANSWER = 4  # shorter ones teach nothing


class _Kind(NamedTuple):
    """Whose answers may serve each other."""

    tenant: str
    cache_salt: str
    adapters: tuple[tuple[str, float], ...]  # (generation, scale)


class _Answers:
    """Recent answers of one kind, in two halves: when the newer is full, the older is dropped."""

    __slots__ = ("halves",)

    def __init__(self) -> None:
        self.halves = [Occurrences()]  # newer first

    def __len__(self) -> int:
        return sum(map(len, self.halves))

    def learn(self, tokens: list[int], max_tokens: int) -> None:
        if len(self.halves[0]) + len(tokens) > max_tokens // 2:
            self.halves = [Occurrences(), self.halves[0]]
        self.halves[0].extend(tokens)

    def longest(self, tail: list[int]) -> tuple[Occurrences, Match] | None:
        best = None
        for half in self.halves:
            match = half.longest(tail, len(half), VOTERS)
            if match is not None and (best is None or match.length > best[1].length):
                best = half, match
        return best


class RecentAnswers:
    """A `TextSource`. `vocab_size` is the model's; bounds are in tokens, and in kinds."""

    name = SOURCE

    def __init__(
        self,
        vocab_size: int,
        *,
        max_tokens: int = 1 << 18,
        max_tokens_of_kind: int = 1 << 16,
        max_kinds: int = 1024,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._max_tokens_of_kind = min(max_tokens_of_kind, max_tokens)
        self._max_kinds = max_kinds
        self._kinds: OrderedDict[_Kind, _Answers] = OrderedDict()  # least recently used first
        self._num_tokens = 0
        self._last: tuple[Request, _Kind] | None = None  # that was asked for

    @property
    def num_tokens(self) -> int:
        """Tokens held of all kinds."""
        return self._num_tokens

    @property
    def num_kinds(self) -> int:
        """Kinds of which answers are held."""
        return len(self._kinds)

    @property
    def num_bytes(self) -> int:
        """Of memory for them, about."""
        return sum(half.num_bytes for kept in self._kinds.values() for half in kept.halves)

    def propose(self, want: Want) -> Draft | None:
        """See `TextSource.propose`."""
        kind = self._kind_of(want.sequence.request)
        answers = self._kinds.get(kind)
        known = num_ids(want.sequence.request, self._vocab_size)
        if answers is None or want.limit <= 0 or not all(0 <= t < known for t in want.after):
            return None
        self._kinds.move_to_end(kind)
        start = max(0, len(want.sequence.tokens) - LONGEST)
        tail = [*readable(want.sequence, start, self._vocab_size), *want.after]
        found = answers.longest(tail)
        if found is None:
            return None
        half, match = found
        tokens, shares = voted(half.tokens, match.ends, want.limit, FLOOR)
        if not tokens:
            return None
        return Draft(
            tokens=tuple(tokens),
            source=SOURCE,
            bucket=bucket(match.length),
            # One occurrence alone has no frequencies.
            chances=tuple(shares) if len(match.ends) > 1 else (),
        )

    def release(self, sequence: Sequence) -> None:
        """See `TextSource.release`: its answer may serve those that come."""
        request = sequence.request
        if not request.speculation.enabled or sequence.num_output_tokens < MIN_ANSWER:
            return
        start = max(0, sequence.num_prompt_tokens - PROMPT_TAIL)
        tokens = readable(sequence, start, self._vocab_size)[: self._max_tokens_of_kind // 4]
        kind = _kind(request)
        answers = self._kinds.setdefault(kind, _Answers())
        self._kinds.move_to_end(kind)
        self._num_tokens -= len(answers)
        answers.learn([*tokens, BARRIER], self._max_tokens_of_kind)
        self._num_tokens += len(answers)
        while self._num_tokens > self._max_tokens or len(self._kinds) > self._max_kinds:
            self._num_tokens -= len(self._kinds.popitem(last=False)[1])

    def forget(self, generation: str) -> None:
        """Drop all answers that an adapter had part in."""
        gone = [k for k in self._kinds if any(generation == use[0] for use in k.adapters)]
        for kind in gone:
            self._num_tokens -= len(self._kinds.pop(kind))

    def _kind_of(self, request: Request) -> _Kind:
        if self._last is None or self._last[0] is not request:
            self._last = request, _kind(request)
        return self._last[1]


def _kind(request: Request) -> _Kind:
    uses = sorted((use.generation, use.scale) for use in request.adapters)
    return _Kind(request.tenant, request.cache_salt, tuple(uses))
