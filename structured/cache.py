"""Caches keyed by content, bounded in bytes: one in memory, one on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from plait.platform.starting.cache_folder import cache_folder

Value = TypeVar("Value")

_MAGIC = b"plait1\n"
_PRUNE_EVERY = 64  # writes


class MemoryCache(Generic[Value]):
    """The values used last, up to a number of bytes. Thread-safe.

    A value larger than the whole budget is not kept.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Value | None:
        """The value, which counts as used now."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                return None
            self._entries.move_to_end(key)
            return found[0]

    def put(self, key: str, value: Value, num_bytes: int) -> None:
        """Keep a value and drop the longest unused ones beyond the budget."""
        with self._lock:
            self._drop(key)
            if num_bytes > self._budget_bytes:
                return
            self._entries[key] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._budget_bytes:
                self._drop(next(iter(self._entries)))

    def discard(self, key: str) -> None:
        """Forget a value, if it is there."""
        with self._lock:
            self._drop(key)

    def _drop(self, key: str) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self._num_bytes -= found[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of all values kept."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def check_integrity(self) -> None:
        """Raises AssertionError where the count of bytes is not that of the values."""
        with self._lock:
            assert self._num_bytes == sum(size for _, size in self._entries.values())
            assert self._num_bytes <= self._budget_bytes


class DiskCache:
    """Byte strings in a folder, one file each, up to a number of bytes. Thread-safe.

    A file is written under another name and then moved, and carries its own SHA-256: what another
    process or a crash left half-written, or anything changed since, counts as absent.
    Faults of the disk do too: a cache must not fail what it serves.
    """

    def __init__(self, folder: Path, *, budget_bytes: int = 256 << 20) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._num_writes = 0

    def get(self, key: str) -> bytes | None:
        """The content under `key` (hex digits)."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        digest, content = data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
        if not data.startswith(_MAGIC) or _digest(key, content) != digest:
            _quietly(path.unlink)
            return None
        _quietly(lambda: os.utime(path))  # used now: pruned last
        return content

    def put(self, key: str, content: bytes) -> None:
        """Keep `content`; now and then the longest unused files beyond the budget go."""
        path = self._path(key)
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_bytes(_MAGIC + _digest(key, content) + content)
            part.replace(path)
        except OSError:
            _quietly(part.unlink)
            return
        with self._lock:
            self._num_writes += 1
            due = self._num_writes % _PRUNE_EVERY == 1
        if due:
            self.prune()

    def prune(self) -> None:
        """Delete the longest unused files until the rest fits the budget."""
        files = []
        for path in _listed(self._folder):
            try:
                stat = path.stat()
            except OSError:
                continue
            files.append((stat.st_mtime, stat.st_size, path))
        num_bytes = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if num_bytes <= self._budget_bytes:
                break
            _quietly(path.unlink)
            num_bytes -= size

    def _path(self, key: str) -> Path:
        if not key or not set(key) <= set("0123456789abcdef"):
            raise ValueError(f"{key!r} is no key")
        return self._folder / f"{key}.grammar"


def default_folder() -> Path:
    """Where compiled grammars are kept: a folder of the user's cache."""
    return cache_folder("grammars")


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + content).digest()


def _listed(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix in (".grammar", ".part")]
    except OSError:
        return []


def _quietly(action: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        action()
