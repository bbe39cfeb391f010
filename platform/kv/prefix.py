"""The longest prefix whose KV can be found, over all groups at once."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from plait.platform.kv.pool import NULL_BLOCK

if TYPE_CHECKING:
    from plait.platform.kv.pool import BlockPool


def first_visible(window: int | None, position: int, block_size: int) -> int:
    """The first table entry that a row at `position` sees; 0 where there is no window."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def find_prefix(
    pools: SequenceOf[BlockPool],
    windows: SequenceOf[int | None],
    block_size: int,
    keys: SequenceOf[bytes],
    own: SequenceOf[SequenceOf[int]],
) -> list[list[int]] | None:
    """Tables of the longest prefix that goes beyond a sequence's own full blocks, or None.

    A prefix is valid if in each group every block that its next row sees is the sequence's own
    or found by its key: all blocks in a full group, those of the window in a sliding one.

    Args:
        pools: one per group.
        windows: one per group.
        block_size: tokens per block.
        keys: content keys of the blocks that a hit may cover.
        own: per group the full blocks that the sequence holds itself, 0 where out of its window.
    """
    num_own = len(own[0])

    def find(g: int, i: int) -> int:
        block = own[g][i] if i < num_own else NULL_BLOCK
        return block or pools[g].find(keys[i]) or NULL_BLOCK

    length = len(keys)
    for g, window in enumerate(windows):
        if window is None:
            length = next((i for i in range(num_own, length) if not find(g, i)), length)
    g = 0
    while length > num_own and g < len(windows):
        start = first_visible(windows[g], length * block_size, block_size)
        if windows[g] is None:
            start = length  # any shorter prefix is valid here too
        missing = next((i for i in reversed(range(start, length)) if not find(g, i)), None)
        if missing is None:
            g += 1
        else:
            # Every length down to this block sees it too: the next one to try ends before it.
            length, g = missing, 0
    if length <= num_own:
        return None
    starts = [first_visible(window, length * block_size, block_size) for window in windows]
    return [
        [NULL_BLOCK] * start + [find(g, i) for i in range(start, length)]
        for g, start in enumerate(starts)
    ]
