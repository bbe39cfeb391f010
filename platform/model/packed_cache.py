"""Packed weights kept on disk, by the content they were made from: a later start maps them.

A key covers the checkpoint's bytes, what every weight is kept as and how kernels lay it out.
Digests of checkpoint files are remembered by path, size, time and inode, so that a warm start
reads nothing of them but their headers. Faults of the disk count as an empty cache: it must not
fail what it serves.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from plait.platform.budget import available_bytes
from plait.platform.config import Options
from plait.platform.model.packed_file import (
    DamagedFile,
    Kept,
    PackedFile,
    open_packed,
    write_packed,
)
from plait.platform.starting.notes import Notes, cache_of, identity, part_of, quietly, read_json

_SUFFIX = ".weights"
_STALE_S = 24 * 3600  # after which another process's unfinished file is rubbish


def open_cache(options: Options) -> PackedCache | None:
    """The cache that `options` ask for; None: none."""
    folder = cache_of(options)
    return None if folder is None else PackedCache(folder, options.packed_cache_bytes)


def has_memory_for(num_bytes: int) -> bool:
    """Whether weights may be this process's own; else they are pages that processes share."""
    return 4 * num_bytes <= available_bytes()


def said(seconds: float, mapped_bytes: int) -> str:
    """How weights of the cache were had, for the banner."""
    how = "mapped" if mapped_bytes else "packed before, read"
    return f"{how} in {seconds:.2f} s"


class PackedCache:
    """Files of packed weights in a folder, up to a number of bytes.

    Files are written under another name and then moved, so that two starts at once do no harm.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.notes = Notes(folder)
        self._folder = folder
        self._budget_bytes = budget_bytes

    def load(self, key: str, *, copy: bool) -> PackedFile | None:
        """Map or copy the weights under a key; a damaged file goes."""
        path = self._path(key)
        try:
            is_known = identity(path) == read_json(self._seal(path))
            found = open_packed(path, verify=not is_known, copy=copy)
            if not is_known:
                self.notes.write_file(self._seal(path), json.dumps(identity(path)).encode())
        except OSError:
            return None
        except DamagedFile:
            quietly(path.unlink)
            return None
        stat = path.stat()
        quietly(lambda: os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns)))  # pruned last
        return found

    def save(self, key: str, num_bytes: int, values: Iterable[tuple[str, Kept]]) -> bool:
        """Keep packed weights, and let the longest unused ones go beyond the budget."""
        path = self._path(key)
        part = part_of(path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._prune(self._budget_bytes - num_bytes)
            if shutil.disk_usage(self._folder).free < 2 * num_bytes:
                return False
            with part.open("xb") as file:
                write_packed(file, values)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            self.notes.write_file(self._seal(path), json.dumps(identity(path)).encode())
        except OSError:
            quietly(part.unlink)
            return False
        return True

    def _prune(self, budget_bytes: int) -> None:
        """Delete unfinished files of others that are old, then the longest unused ones."""
        files = []
        for path in self._folder.iterdir():
            stat = path.stat()
            if path.suffix == ".part" and time.time() - stat.st_mtime > _STALE_S:
                quietly(path.unlink)
            elif path.suffix == _SUFFIX:
                files.append((stat.st_atime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= budget_bytes:
                break
            quietly(path.unlink)
            quietly(self._seal(path).unlink)
            total -= size

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _seal(self, path: Path) -> Path:
        """Says as which file the weights were last written or verified whole."""
        return path.with_suffix(".seal")
