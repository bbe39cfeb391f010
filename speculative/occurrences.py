"""Where the end of a text occurred before, in a text that grows: hash chains over its n-grams.

Each position is in the chain of the three tokens that end there, as in a compressor's window, and
in the chain of that one token alone, for where no three match:

    tokens    a b c x a b c y a b c      heads[slot(a b c)] = 10
    previous  . . . . . . 2 . . . 6      10 -> 6 -> 2

A chain may hold other n-grams of the same slot. Tokens are compared, so that costs only time.
20 to 28 bytes a token; a suffix automaton is exact however long chains are, and takes about 1 KB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

LONGEST = 64  # longer matches count as this long
BARRIER = -1  # stands in the text where nothing may match nor be copied
NUM_IDS = 1 << 21  # ids from here on are barriers; below, slots are computed without overflow

_WALK = 32  # of a chain's latest positions, how many are looked at
_BULK = 48  # from so many tokens on, numpy is quicker than a loop
_MIN_SLOTS = 256
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)  # odd, below 2^32: sums of products fit in 63 bits
_SHIFT = 19


@dataclass(frozen=True, slots=True)
class Match:
    """The longest match of a text's end, and the positions behind its occurrences, latest first."""

    length: int
    ends: tuple[int, ...]


class Occurrences:
    """A text and its chains. `tokens` may be read, and grows by `extend` alone."""

    __slots__ = ("_ones", "_threes", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self._threes = _Chains(3)
        self._ones = _Chains(1)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """Of memory for the text and its chains."""
        return 4 * len(self.tokens) + self._threes.num_bytes + self._ones.num_bytes

    def extend(self, tokens: Iterable[int]) -> None:
        """Append to the text. O(1) a token, amortised: chains are rebuilt when it has doubled."""
        self.tokens.extend(tokens)
        self._threes.catch_up(self.tokens)
        self._ones.catch_up(self.tokens)

    def longest(self, tail: SequenceOf[int], stop: int, most: int = 1) -> Match | None:
        """Where the end of `tail` occurred, ending before position `stop`; at most `most` ends.

        The longest among the latest `_WALK` occurrences of its last three tokens, or last one.
        """
        for chains in (self._threes, self._ones):
            match = self._best(chains, tail, stop, most)
            if match is not None:
                return match
        return None

    def _best(self, chains: _Chains, tail: SequenceOf[int], stop: int, most: int) -> Match | None:
        tokens, last = self.tokens, len(tail) - 1
        most_length = min(len(tail), LONGEST)
        best = chains.num_tokens
        ends: list[int] = []
        for position in chains.positions(tail, stop):
            # A quick look at the token that would make it as long as the best.
            if position < best - 1 or tokens[position - best + 1] != tail[last - best + 1]:
                continue
            length, longest = 0, min(most_length, position + 1)
            while length < longest and tokens[position - length] == tail[last - length] >= 0:
                length += 1
            if length > best or (length == best and not ends):
                best, ends = length, [position + 1]
            elif length == best and len(ends) < most:
                ends.append(position + 1)
            if best == most_length and len(ends) == most:
                break
        return Match(best, tuple(ends)) if ends else None


class _Chains:
    """The chains of all n-grams of one length."""

    __slots__ = ("_heads", "_previous", "num_tokens")

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._previous = array("i")  # by position: the one before it in its chain, or -1
        self._heads = array("i", [-1]) * _MIN_SLOTS  # by slot: the latest position, or -1

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self._previous) + len(self._heads))

    def positions(self, tail: SequenceOf[int], stop: int) -> list[int]:
        """The latest positions before `stop` in the chain of the last tokens of `tail`."""
        last = tail[-self.num_tokens :]
        if len(last) < self.num_tokens or min(last) < 0:
            return []
        found: list[int] = []
        previous = self._previous
        position = self._heads[self._slot(tail, len(tail) - 1)]
        while position >= 0 and len(found) < _WALK:
            if position < stop:
                found.append(position)
            position = previous[position]
        return found

    def catch_up(self, tokens: array[int]) -> None:
        """Chain the tokens that are new since the last time."""
        start, stop = len(self._previous), len(tokens)
        self._previous.extend(array("i", [-1]) * (stop - start))
        if stop > len(self._heads):
            self._heads = array("i", [-1]) * (1 << stop.bit_length())
            start = 0
        start = max(start, self.num_tokens - 1)
        if stop - start >= _BULK:
            self._chain_many(tokens, start, stop)
            return
        for position in range(start, stop):
            if min(tokens[position - self.num_tokens + 1 : position + 1]) >= 0:
                slot = self._slot(tokens, position)
                self._previous[position] = self._heads[slot]
                self._heads[slot] = position

    def _slot(self, tokens: SequenceOf[int], last: int) -> int:
        mixed = tokens[last] * _FACTORS[0]
        if self.num_tokens == 3:
            mixed += tokens[last - 1] * _FACTORS[1] + tokens[last - 2] * _FACTORS[2]
        return (mixed ^ (mixed >> _SHIFT)) & (len(self._heads) - 1)

    def _chain_many(self, tokens: array[int], start: int, stop: int) -> None:
        """The loop of `catch_up` over many positions at once."""
        text = np.frombuffer(tokens, np.int32)[:stop].astype(np.int64)
        mixed = np.zeros(stop - start, np.int64)
        whole = np.ones(stop - start, bool)
        for back, factor in zip(range(self.num_tokens), _FACTORS, strict=False):
            part = text[start - back : stop - back]
            mixed += part * factor
            whole &= part >= 0
        slots = ((mixed ^ (mixed >> _SHIFT)) & (len(self._heads) - 1))[whole]
        positions = np.arange(start, stop, dtype=np.int32)[whole]
        order = np.argsort(slots, kind="stable")
        slots, positions = slots[order], positions[order]
        heads = np.frombuffer(self._heads, np.int32)
        before = heads[slots]
        same = slots[1:] == slots[:-1]
        before[1:][same] = positions[:-1][same]
        np.frombuffer(self._previous, np.int32)[positions] = before
        heads[slots] = positions  # of a slot's positions the last one stays
