"""The blocks of one KV group: who is free, how often each is held, what content each keeps.

A block is in exactly one of three states:

    held        references > 0
    evictable   references = 0, and it still has a content key: found by prefix lookups until reused
    blank       references = 0, no key

Blank and evictable blocks form one free list. Blank ones are taken first, then evictable ones in
the order in which they were dropped, so the least recently used content goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 … `num_blocks` - 1; block 0 is the null block and is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give: blank and evictable ones."""
        return len(self._free)

    def references(self, block: int) -> int:
        """How often a block is held."""
        return self._references[block]

    def take(self) -> int:
        """Give out a free block with one reference; content it still kept is forgotten.

        The caller has checked `num_free`.
        """
        block, _ = self._free.popitem(last=False)
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None
        self._references[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a reference to a held or evictable block."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def drop(self, block: int) -> None:
        """Give back one reference. The last one makes the block evictable, or blank."""
        references = self._references[block] - 1
        assert references >= 0, f"block {block} dropped more often than held"
        self._references[block] = references
        if references == 0:
            self._free[block] = None
            if self._key[block] is None:
                self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """Let a held block be found by its content key.

        Where another block has the key already, that one stays the one to be found.
        """
        assert self._references[block] > 0, f"block {block} published while nobody holds it"
        if self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def find(self, key: bytes) -> int | None:
        """The block that keeps this content, held or evictable."""
        return self._by_key.get(key)

    def key(self, block: int) -> bytes | None:
        """The content key under which a block is found, if any."""
        return self._key[block]

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless the pool agrees with itself and with `holders`.

        `holders` counts for each block how many table entries and reservations name it.
        """
        assert NULL_BLOCK not in self._free, "the null block is free"
        for block in range(1, self.num_blocks):
            counted, found = self._references[block], holders.get(block, 0)
            assert counted == found, f"block {block}: {counted} references, {found} holders"
            assert (block in self._free) == (counted == 0), f"block {block}: {counted} and free"
        held = sum(1 for count in self._references[1:] if count)
        assert held + len(self._free) == self.num_usable, "held and free do not make the total"
        named = {block: key for block, key in enumerate(self._key) if key is not None}
        assert {key: block for block, key in named.items()} == self._by_key, "keys disagree"
