"""Whether a grammar's masks come quickly enough to stand beside other requests.

A grammar of fifty bytes may compile in a millisecond and then take a third of a second for each
mask, and a step waits for the slowest of its rows. So a compile worker opens what it has compiled
and walks along a few texts of it, as the engine will, and a grammar that is too slow is refused
before anybody waits for it.

What is counted is processor time of one thread, so that a busy machine makes nobody's grammar
slower; and a verdict needs two tries, so that a hiccup does not either.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from plait.platform.errors import GrammarTooComplex, InternalError
from plait.structured.backends import ParserFault
from plait.structured.matcher import Matcher
from plait.structured.unique import Uniqueness

if TYPE_CHECKING:
    from plait.structured.backends import Backend, Grammar
    from plait.structured.spec import CompiledGrammar
    from plait.structured.vocabulary import Mask, Vocabulary

Clock = Callable[[], float]
Ids = npt.NDArray[np.integer[Any]]
Bits = npt.NDArray[np.uint8]  # a row of a mask, eight tokens in each

NUM_TRIES = 2  # that must be too slow
NUM_TOKENS = 6  # of each of four walks
_NUM_FORCED = 16  # drafts, of which a step proposes no more
_NUM_VETOED = 4  # tokens of a row that a sampler may have to ask about

_NUM_ALIKE = 16
_LEADING = rb'{["(\<'  # what texts go deeper with
_FRONT = 2048  # tokens that are looked through first for those that may follow
_FEW_WORDS = 8  # of a row: then its tokens are found one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLimits:
    """Seconds of processor time."""

    open_s: float = 0.5  # beside the steps, and but for a few ms without the interpreter's lock
    token_s: float = 0.02  # for any one token: about what a small model's step takes
    mean_s: float = 0.003  # for a token on average


class TooSlow(Exception):
    """A grammar went beyond a limit in one try; the text says which."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Opens grammars for one vocabulary and walks along texts of them."""

    vocabulary: Vocabulary
    clock: Clock
    limits: TrialLimits = field(default_factory=TrialLimits)

    def check(self, compiled: CompiledGrammar, backend: Backend, *, compile_s: float = 0.0) -> None:
        """Raise `GrammarTooComplex` where masks take too long, or cannot be made at all.

        `compile_s`: what compiling took. A backend that opens by compiling may hand out what it has
        just compiled, and would then seem to open in no time.
        """
        open_s = compile_s if backend.opens_by_compiling else 0.0
        for number in range(NUM_TRIES):
            try:
                self._try(compiled, backend, 0.0 if number else open_s)
                return
            except TooSlow as slow:
                reason = f"is too slow to hold an answer to: {slow}"
            except (ParserFault, InternalError, GrammarTooComplex) as fault:
                reason = f"is beyond what its library can follow: {fault}"
            if number == NUM_TRIES - 1:
                raise GrammarTooComplex(
                    f"the grammar {reason}. Simplify it: what costs are counts such as {{0,150}} "
                    "around alternatives or around other counts, and rules that read the same text "
                    "in many ways. Use * instead of a count, a class of characters instead of "
                    "alternatives, or maxLength in a JSON schema"
                )

    def warm(self) -> None:
        """Sort the vocabulary now."""
        _ = self._tastes

    def _try(self, compiled: CompiledGrammar, backend: Backend, open_s: float) -> None:
        began = self.clock()
        grammar = backend.load(compiled.payload)
        seconds = max(self.clock() - began, open_s)
        if seconds > self.limits.open_s:
            raise TooSlow(_beyond("opening it", seconds, self.limits.open_s))
        # A text is the same in each try and on each machine: the key is made of the content.
        rng = random.Random(compiled.key)
        start = self._matcher(grammar, compiled)
        sight = _look(start, self.clock)
        spent: list[float] = []
        for taste in self._tastes:
            walk = _Walk(start, sight, taste, rng, self.clock)
            for _ in range(NUM_TOKENS):
                spent.append(walk.step())
                self._judge(spent)
                if walk.ended:
                    break

    def _judge(self, spent: list[float]) -> None:
        """A mean above its limit shows as soon as all tokens together are beyond theirs."""
        limits = self.limits
        if spent[-1] > limits.token_s:
            raise TooSlow(_beyond("one token", spent[-1], limits.token_s))
        if sum(spent) > limits.mean_s * NUM_TOKENS * len(self._tastes):
            mean = sum(spent) / len(spent)
            raise TooSlow(_beyond("a token on average", mean, limits.mean_s))

    def _matcher(self, grammar: Grammar, compiled: CompiledGrammar) -> Matcher:
        unique = Uniqueness(compiled.checks) if compiled.checks else None
        return Matcher(grammar.parser(), self.vocabulary, unique)

    @cached_property
    def _tastes(self) -> tuple[_Taste, ...]:
        """What walks prefer: anything; long tokens; those that lead deeper; short words."""
        pieces = self.vocabulary.pieces
        worths = (
            [0 for _ in pieces],
            [len(piece) for piece in pieces],
            [piece[:1] in _LEADING if piece else 0 for piece in pieces],
            [100 * piece.isalnum() // max(1, len(piece)) for piece in pieces],
        )
        return tuple(_Taste.of(np.array(worth, np.int32)) for worth in worths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taste:
    """Tokens by how much a walk likes them."""

    order: Ids  # the best first
    in_bytes: Ids  # in that order: where each stands in a row of bits
    in_bits: Bits
    num_alike: int | None  # of those that may follow, one of so many is taken

    @classmethod
    def of(cls, worth: Ids) -> _Taste:
        order = np.argsort(-worth, kind="stable")
        return cls(
            order=order,
            in_bytes=order >> 3,
            in_bits=(1 << (order & 7)).astype(np.uint8),
            num_alike=_NUM_ALIKE if worth.any() else None,
        )

    def best(self, row: Mask) -> Sequence[int] | Ids:
        """Of the tokens that may follow, those between which it has no preference."""
        words = np.flatnonzero(row != 0)
        if len(words) <= _FEW_WORDS:
            tokens = _tokens_of(row, words)
            if self.num_alike is None or len(tokens) <= self.num_alike:
                return tokens
        allowed = row.view(np.uint8)
        if self.num_alike is None:
            return np.flatnonzero(np.unpackbits(allowed, bitorder="little").view(np.bool_))
        places = self._places(allowed, _FRONT)
        for num_best in (8 * _FRONT, len(self.order)):  # mostly there are enough in front
            if len(places) < self.num_alike:
                places = self._places(allowed, num_best)
        return self.order[places[: self.num_alike]]

    def _places(self, allowed: Bits, num_best: int) -> Ids:
        """Which of the best may follow, by their places in the order."""
        bits = allowed[self.in_bytes[:num_best]] & self.in_bits[:num_best]
        return np.flatnonzero(bits != 0)


def _tokens_of(row: Mask, words: Ids) -> list[int]:
    """The tokens of a few words of a row."""
    return [
        32 * word + bit
        for word, bits in zip(words.tolist(), row[words].tolist(), strict=True)
        for bit in range(32)
        if bits >> bit & 1
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """What the engine has to find out at one place of a text, and what that took."""

    allowed: Mask  # tokens that may follow, never an end
    seconds: float
    ended: bool


def _look(matcher: Matcher, clock: Clock) -> _Sight:
    row: Mask = np.zeros(matcher.vocabulary.num_words, np.int32)
    began = clock()
    ended = matcher.finished
    if not ended:
        matcher.forced_tokens(_NUM_FORCED)
        if not matcher.fill(row):
            row[:] = -1
    seconds = clock() - began
    row &= ~matcher.vocabulary.end_mask
    return _Sight(allowed=row, seconds=seconds, ended=ended)


class _Walk:
    """One text, and what the engine would have to do for each token of it.

    All walks begin at one place, which is looked at once and counts for each of them.
    """

    def __init__(
        self, start: Matcher, sight: _Sight, taste: _Taste, rng: random.Random, clock: Clock
    ) -> None:
        self._matcher = start.copy()
        self._sight: _Sight | None = sight
        self._taste = taste
        self._rng = rng
        self._clock = clock
        self.ended = False

    def step(self) -> float:
        """Go on by one token, and return what that took."""
        sight, self._sight = self._sight or _look(self._matcher, self._clock), None
        self.ended = sight.ended
        if self.ended:
            return sight.seconds
        chosen = self._chosen(sight.allowed)  # not the engine's work
        began = self._clock()
        self.ended = not any(map(self._advances, chosen))
        return sight.seconds + self._clock() - began

    def _advances(self, token: int) -> bool:
        return not self._matcher.vetoes(token) and self._matcher.accept(token)

    def _chosen(self, allowed: Mask) -> list[int]:
        """A few tokens that may follow: one of them is not vetoed."""
        best = self._taste.best(allowed)
        if not len(best):
            return []
        return [int(best[self._rng.randrange(len(best))]) for _ in range(_NUM_VETOED)]


def _beyond(what: str, seconds: float, limit: float) -> str:
    return (
        f"{what} takes {1e3 * seconds:,.0f} ms of processor time, {1e3 * limit:,.0f} are the limit"
    )
