"""Items that must not be repeated: a reader beside the grammar that vetoes tokens.

Grammars cannot compare items. So the text that was accepted is followed here, byte by byte, along
the table that `plait.structured.schema.uniqueness` made, and a token is vetoed that would end an
item like an earlier one, or begin what could only become one. Forbidding just the vetoed tokens
that are chosen is the same as masking all of them. The grammar sees to everything else, so that
what is read here is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.structured.unique_reader import Reader
from plait.structured.unique_table import load

_MAX_KEPT = 64  # states to go back to; to go further back, the text is read again


class Uniqueness:
    """What one sequence has written, and which tokens may not follow for its items' sake."""

    def __init__(self, checks: bytes) -> None:
        self._table = load(checks)
        self._reader = Reader(self._table)
        self._pieces: list[bytes] = []
        self._kept: list[Reader] = []  # before each of the last pieces

    def vetoes(self, piece: bytes, after: Sequence[bytes] = ()) -> bool:
        """Whether a token of these bytes may not follow, behind drafts that may."""
        reader = self._reader.copy()
        return not all(map(reader.feed, (*after, piece)))

    def count_legal(self, pieces: Sequence[bytes]) -> int:
        """How many of the pieces may follow in a row."""
        reader = self._reader.copy()
        for number, piece in enumerate(pieces):
            if not reader.feed(piece):
                return number
        return len(pieces)

    def accept(self, piece: bytes) -> bool:
        """Advance; False where the token may not follow, and nothing has changed then."""
        before, after = self._reader, self._reader.copy()
        if not after.feed(piece):
            return False
        self._reader = after
        self._pieces.append(piece)
        self._kept.append(before)
        del self._kept[:-_MAX_KEPT]
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens."""
        if num_tokens == 0:
            return
        del self._pieces[-num_tokens:]
        if num_tokens <= len(self._kept):
            self._reader = self._kept[-num_tokens]
            del self._kept[-num_tokens:]
            return
        self._reader, self._kept = Reader(self._table), []
        self._reader.feed(b"".join(self._pieces))

    def copy(self) -> Uniqueness:
        """An independent one at the same place."""
        other = object.__new__(Uniqueness)
        other._table, other._reader = self._table, self._reader
        other._pieces, other._kept = self._pieces.copy(), self._kept.copy()
        return other
