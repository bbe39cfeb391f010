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

    def extend(self, tokens: SequenceOf[int]) -> None:
        """Append to the text. O(1) a token, amortised: chains are rebuilt when it has doubled."""
        start = len(self.tokens)
        self.tokens.extend(tokens)
        if len(self.tokens) > len(self._ones.heads):
            for chains in (self._threes, self._ones):
                chains.clear(1 << len(self.tokens).bit_length())
            start = 0
        if len(self.tokens) - start < _BULK:
            self._chain(start)
        else:
            self._threes.chain_many(self.tokens, start)
            self._ones.chain_many(self.tokens, start)

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
        # One flat loop, as every sequence goes through it in every step.
        if len(tail) < chains.num_tokens or min(tail[-chains.num_tokens :]) < 0:
            return None
        tokens, previous, last = self.tokens, chains.previous, len(tail) - 1
        most_length = min(len(tail), LONGEST)
        best, num_walked = chains.num_tokens, 0
        ends: list[int] = []
        position = chains.head(tail)
        while position >= 0 and num_walked < _WALK:
            if position < stop:
                num_walked += 1
                # A quick look at the token that would make it as long as the best.
                if position >= best - 1 and tokens[position - best + 1] == tail[last - best + 1]:
                    length, longest = 0, min(most_length, position + 1)
                    while (
                        length < longest and tokens[position - length] == tail[last - length] >= 0
                    ):
                        length += 1
                    if length > best:
                        best, ends = length, [position + 1]
                    elif length == best and len(ends) < most:
                        ends.append(position + 1)
                    if best == most_length and len(ends) == most:
                        break
            position = previous[position]
        return Match(best, tuple(ends)) if ends else None

    def _chain(self, start: int) -> None:
        """Chain the tokens from `start` on, one by one."""
        ones, threes, mask = self._ones, self._threes, len(self._ones.heads) - 1
        newest, newer, older = _FACTORS
        a, b = [BARRIER, BARRIER, *self.tokens[max(0, start - 2) : start]][-2:]
        for position in range(start, len(self.tokens)):
            c = self.tokens[position]
            one = three = -1
            if c >= 0:
                mixed = c * newest
                slot = (mixed ^ (mixed >> _SHIFT)) & mask
                one, ones.heads[slot] = ones.heads[slot], position
                if a >= 0 and b >= 0:
                    mixed += b * newer + a * older
                    slot = (mixed ^ (mixed >> _SHIFT)) & mask
                    three, threes.heads[slot] = threes.heads[slot], position
            ones.previous.append(one)
            threes.previous.append(three)
            a, b = b, c


class _Chains:
    """The chains of all n-grams of one length."""

    __slots__ = ("heads", "num_tokens", "previous")

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.clear(_MIN_SLOTS)

    def clear(self, num_slots: int) -> None:
        self.heads = array("i", [-1]) * num_slots  # by slot: the latest position, or -1
        self.previous = array("i")  # by position: the one before it in its chain, or -1

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self.previous) + len(self.heads))

    def head(self, tail: SequenceOf[int]) -> int:
        """The latest position in the chain of the last tokens of `tail`, which are no barriers."""
        mixed = 0
        for back in range(self.num_tokens):
            mixed += tail[-1 - back] * _FACTORS[back]
        return self.heads[(mixed ^ (mixed >> _SHIFT)) & (len(self.heads) - 1)]

    def chain_many(self, tokens: array[int], start: int) -> None:
        """`Occurrences._chain` for many positions at once."""
        stop = len(tokens)
        self.previous.extend(array("i", [-1]) * (stop - start))
        start = max(start, self.num_tokens - 1)
        first = start - self.num_tokens + 1
        text = np.frombuffer(tokens, np.int32)[first:].astype(np.int64)
        mixed = np.zeros(stop - start, np.int64)
        whole = np.ones(stop - start, bool)
        for back in range(self.num_tokens):
            part = text[start - back - first : stop - back - first]
            mixed += part * _FACTORS[back]
            whole &= part >= 0
        slots = ((mixed ^ (mixed >> _SHIFT)) & (len(self.heads) - 1))[whole]
        positions = np.arange(start, stop, dtype=np.int32)[whole]
        order = np.argsort(slots, kind="stable")
        slots, positions = slots[order], positions[order]
        heads = np.frombuffer(self.heads, np.int32)
        before = heads[slots]
        same = slots[1:] == slots[:-1]
        before[1:][same] = positions[:-1][same]
        np.frombuffer(self.previous, np.int32)[positions] = before
        heads[slots] = positions  # of a slot's positions the last one stays
