"""Small things that one start finds out and later ones need not: JSON files beside packed weights.

Each is kept under a key of all that it depends on. Faults of the disk count as an empty cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from plait.platform.config import Options
from plait.platform.starting.cache_folder import cache_folder

_SUFFIX = ".start"
_MAX_NOTES = 128
_MAX_DIGESTS = 256  # of files that are remembered


def cache_of(options: Options) -> Path | None:
    """The folder of packed weights and notes that `options` ask for; None: none."""
    if options.packed_cache == "off":
        return None
    chosen = options.packed_cache
    return cache_folder("weights") if chosen is None else Path(chosen).expanduser()


class Notes:
    """Notes in one folder. Files are written under another name and then moved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: str) -> Any:
        """What `write` wrote under a key; None where it is not there whole."""
        path = self._path(key)
        try:
            digest, _, content = path.read_bytes().partition(b"\n")
        except OSError:
            return None
        if digest.decode(errors="replace") != hashlib.sha256(content).hexdigest():
            return None
        quietly(lambda: os.utime(path))  # pruned last
        return json.loads(content)

    def write(self, key: str, note: Any) -> None:
        """Keep what JSON can have; the longest unused go."""
        content = json.dumps(note).encode()
        digest = hashlib.sha256(content).hexdigest()
        self.write_file(self._path(key), digest.encode() + b"\n" + content)
        quietly(self._prune)

    def digest(self, path: Path) -> str:
        """SHA-256 of a file, remembered for as long as it looks the same. Raises `OSError`."""
        name, found = str(path.resolve()), identity(path)
        memo = self._folder / "digests.json"
        known = read_json(memo)
        known = known if isinstance(known, dict) else {}
        if known.get(name, [None])[0] == found:
            return str(known[name][1])
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        known.pop(name, None)
        kept = dict([*known.items(), (name, [found, digest])][-_MAX_DIGESTS:])
        quietly(lambda: self.write_file(memo, json.dumps(kept).encode()))
        return digest

    def write_file(self, path: Path, content: bytes) -> None:
        """Replace a small file of the folder at once."""
        part = part_of(path)
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_bytes(content)
            part.replace(path)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _prune(self) -> None:
        notes = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda p: p.stat().st_mtime_ns)
        for path in notes[:-_MAX_NOTES]:
            quietly(path.unlink)


# --- what notes depend on ---


def key_of(*parts: Any) -> str:
    """One key for all of `parts`, which JSON can have."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def code(folder: Path, libraries: Sequence[str], *files: Path) -> list[Any]:
    """Of sources as they lie in `folder`, and of `files`; and which libraries they stand on."""
    paths = [path for path in (*sorted(folder.rglob("*.py")), *files) if path.exists()]
    versions = [[name, metadata.version(name)] for name in libraries]
    return [list(sys.version_info[:3]), versions, [[str(p), *identity(p)] for p in paths]]


def identity(path: Path) -> list[int]:
    """Another one for a file that was written since. Raises `OSError`."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def has_changed(files: Iterable[Sequence[Any]]) -> bool:
    """Whether one of these, each a path with its identity, is not what it was."""
    try:
        return any(identity(Path(path)) != found for path, *found in files)
    except OSError:
        return True


# --- for whoever keeps other things there ---


def part_of(path: Path) -> Path:
    """A name that nobody else writes to."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")


def read_json(path: Path) -> Any:
    """What a file has; None where it is not there or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def quietly(action: Callable[[], object]) -> None:
    """Let the disk's faults pass."""
    with contextlib.suppress(OSError):
        action()
