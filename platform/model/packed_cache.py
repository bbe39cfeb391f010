"""Packed weights kept on disk, by the content they were made from: a later start maps them.

A key covers the checkpoint's bytes, what every weight is kept as and how kernels lay it out.
Digests of checkpoint files are remembered by path, size, time and inode, so that a warm start
reads nothing of them but their headers. Faults of the disk count as an empty cache: it must not
fail what it serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from plait.platform.budget import available_bytes
from plait.platform.cache_folder import cache_folder
from plait.platform.config import Options
from plait.platform.model.packed_file import (
    DamagedFile,
    Kept,
    PackedFile,
    open_packed,
    write_packed,
)

_SUFFIX = ".weights"
_NOTE_SUFFIX = ".start"
_MAX_NOTES = 64
_MAX_DIGESTS = 256  # of checkpoint files that are remembered
_STALE_S = 24 * 3600  # after which another process's unfinished file is rubbish


def open_cache(options: Options) -> PackedCache | None:
    """The cache that `options` ask for; None: none."""
    if options.packed_cache == "off":
        return None
    chosen = options.packed_cache
    folder = cache_folder("weights") if chosen is None else Path(chosen).expanduser()
    return PackedCache(folder, options.packed_cache_bytes)


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
        self._folder = folder
        self._budget_bytes = budget_bytes

    def load(self, key: str, *, copy: bool) -> PackedFile | None:
        """Map or copy the weights under a key; a damaged file goes."""
        path = self._path(key)
        try:
            is_known = self._identity(path) == _read_json(self._seal(path))
            found = open_packed(path, verify=not is_known, copy=copy)
            if not is_known:
                self._write(self._seal(path), json.dumps(self._identity(path)).encode())
        except OSError:
            return None
        except DamagedFile:
            _quietly(path.unlink)
            return None
        stat = path.stat()
        _quietly(lambda: os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns)))  # pruned last
        return found

    def save(self, key: str, num_bytes: int, values: Iterable[tuple[str, Kept]]) -> bool:
        """Keep packed weights, and let the longest unused ones go beyond the budget."""
        path = self._path(key)
        part = _part_of(path)
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
            self._write(self._seal(path), json.dumps(self._identity(path)).encode())
        except OSError:
            _quietly(part.unlink)
            return False
        return True

    def read_note(self, key: str) -> Any:
        """What `write_note` wrote under a key; None where it is not there whole."""
        path = self._note(key)
        try:
            digest, _, content = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        if digest.decode(errors="replace") != hashlib.sha256(content).hexdigest():
            return None
        _quietly(lambda: os.utime(path))  # pruned last
        return json.loads(content)

    def write_note(self, key: str, note: Any) -> None:
        """Keep something small beside the weights, as JSON; the longest unused go."""
        content = json.dumps(note).encode()
        digest = hashlib.sha256(content).hexdigest()
        self._write(self._note(key), digest.encode() + b"\n" + content)
        _quietly(self._prune_notes)

    def _note(self, key: str) -> Path:
        return self._folder / f"{key}{_NOTE_SUFFIX}"

    def _prune_notes(self) -> None:
        notes = sorted(self._folder.glob(f"*{_NOTE_SUFFIX}"), key=lambda p: p.stat().st_mtime_ns)
        for path in notes[:-_MAX_NOTES]:
            _quietly(path.unlink)

    def _prune(self, budget_bytes: int) -> None:
        """Delete unfinished files of others that are old, then the longest unused ones."""
        files = []
        for path in self._folder.iterdir():
            stat = path.stat()
            if path.suffix == ".part" and time.time() - stat.st_mtime > _STALE_S:
                _quietly(path.unlink)
            elif path.suffix == _SUFFIX:
                files.append((stat.st_atime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= budget_bytes:
                break
            _quietly(path.unlink)
            _quietly(self._seal(path).unlink)
            total -= size

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _seal(self, path: Path) -> Path:
        """Says as which file the weights were last written or verified whole."""
        return path.with_suffix(".seal")

    def _identity(self, path: Path) -> list[int]:
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns, stat.st_ino]

    def digest(self, path: Path) -> str:
        """SHA-256 of a checkpoint's file, remembered for as long as it looks the same."""
        name, identity = str(path.resolve()), self._identity(path)
        memo = self._folder / "digests.json"
        known = _read_json(memo)
        known = known if isinstance(known, dict) else {}
        if known.get(name, [None])[0] == identity:
            return str(known[name][1])
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        known.pop(name, None)
        kept = dict([*known.items(), (name, [identity, digest])][-_MAX_DIGESTS:])
        _quietly(lambda: self._write(memo, json.dumps(kept).encode()))
        return digest

    def _write(self, path: Path, content: bytes) -> None:
        """Replace a small file at once."""
        part = _part_of(path)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_bytes(content)
            part.replace(path)


def _part_of(path: Path) -> Path:
    """A name that nobody else writes to."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _quietly(action: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        action()
