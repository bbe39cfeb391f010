"""Embeddings of images, kept by content within a budget of bytes.

    absent → computing → resident → absent
             └ reserved: it has its bytes, and will be computed in this step

An entry is held by those that need it now, and only what nobody holds is evicted, the least
recently held first. Who parks or has consumed an image lets go of it: so a parked sequence never
keeps bytes from others, and finds its images again if nobody needed their bytes.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING

from plait.platform.errors import InternalError
from plait.platform.image_rows import tower_uses

if TYPE_CHECKING:
    import torch

    from plait.platform.core import ImageItem, Request

_DOMAIN = b"plait.encoder.1"


def encoder_key(request: Request, item: ImageItem) -> bytes:
    """What an image's embeddings depend on, by content, and who may share them: the salt's own."""
    digest = sha256(_DOMAIN)
    for text in (request.cache_salt, item.key):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(data)) + data)
    digest.update(struct.pack("<Q", item.num_embeds))
    for tower, scale in tower_uses(request, item):
        digest.update(struct.pack("<Q", len(tower)) + tower.encode() + struct.pack("<d", scale))
    return digest.digest()


class EntryState(StrEnum):
    """Where an entry stands; one that is absent is no entry."""

    COMPUTING = "computing"
    RESIDENT = "resident"


@dataclass(slots=True, eq=False)
class Entry:
    """One image's embeddings, or the place for them."""

    key: bytes
    num_rows: int
    num_bytes: int
    refs: int = 0
    rows: torch.Tensor | None = None

    @property
    def state(self) -> EntryState:
        """Where it stands."""
        return EntryState.COMPUTING if self.rows is None else EntryState.RESIDENT


@dataclass(slots=True, eq=False)
class Reservation:
    """A hold on one entry, which stays until it is released."""

    entry: Entry
    cache: EncoderCache

    def commit(self, rows: torch.Tensor) -> None:
        """The entry has been computed."""
        self.cache._fill(self.entry, rows)

    def release(self) -> None:
        """Let go; what nobody holds may be evicted, and what was not computed goes at once."""
        self.cache._drop(self.entry)


class EncoderCache:
    """Entries of at most `capacity` bytes together. Belongs to the engine's thread."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0  # of all entries
        self.num_computing_rows = 0
        self.num_evictions = 0
        self._entries: dict[bytes, Entry] = {}
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()  # nobody's, the next to go first
        self._idle_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def try_reserve(self, key: bytes, num_rows: int, num_bytes: int) -> Reservation | None:
        """Hold an entry, which is made if it is absent; None where held ones leave no room."""
        entry = self._entries.get(key)
        if entry is None:
            if not self._make_room(num_bytes):
                return None
            entry = self._entries[key] = Entry(key, num_rows, num_bytes)
            self.num_bytes += num_bytes
            self.num_computing_rows += num_rows
        elif not entry.refs:
            del self._idle[key]
            self._idle_bytes -= num_bytes
        entry.refs += 1
        return Reservation(entry, self)

    def _make_room(self, num_bytes: int) -> bool:
        if num_bytes > self.capacity - self.num_bytes + self._idle_bytes:
            return False
        while self.num_bytes + num_bytes > self.capacity:
            _, entry = self._idle.popitem(last=False)
            self._idle_bytes -= entry.num_bytes
            self._forget(entry)
            self.num_evictions += 1
        return True

    def _fill(self, entry: Entry, rows: torch.Tensor) -> None:
        if entry.rows is not None:
            return
        if len(rows) != entry.num_rows or rows.nbytes != entry.num_bytes:
            raise InternalError(
                f"the encoder made {len(rows)} embeddings of {rows.nbytes} bytes, not "
                f"{entry.num_rows} of {entry.num_bytes}"
            )
        # A part of a larger tensor would keep all of that.
        entry.rows = rows if rows.untyped_storage().nbytes() == rows.nbytes else rows.clone()
        self.num_computing_rows -= entry.num_rows

    def _drop(self, entry: Entry) -> None:
        entry.refs -= 1
        if entry.refs:
            return
        if entry.rows is None:
            self.num_computing_rows -= entry.num_rows
            self._forget(entry)
        else:
            self._idle[entry.key] = entry
            self._idle_bytes += entry.num_bytes

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self.num_bytes -= entry.num_bytes

    def check_integrity(self, held: Iterable[Reservation]) -> None:
        """Raise AssertionError unless bytes, rows and `held`, all that was not released, agree."""
        refs = Counter(id(one.entry) for one in held)
        entries = self._entries.values()
        assert self.num_bytes == sum(e.num_bytes for e in entries) <= self.capacity, "bytes"
        computing = [e for e in entries if e.state is EntryState.COMPUTING]
        assert self.num_computing_rows == sum(e.num_rows for e in computing), "rows to compute"
        assert all(e.refs for e in computing), "computing for nobody"
        assert self._idle.keys() == {e.key for e in entries if not e.refs}, "idle entries"
        assert self._idle_bytes == sum(e.num_bytes for e in self._idle.values()), "idle bytes"
        for entry in entries:
            assert entry.refs == refs.pop(id(entry), 0), "references miscounted"
        assert not refs, "a hold on an entry that is gone"
