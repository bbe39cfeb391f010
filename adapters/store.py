"""Copies of adapters under the hash of their content, so that what is loaded is what was named.

    <root>/<generation>/adapter_config.json, adapter_model.safetensors[, …]

A source is read once, through descriptors, and hashed while it is copied: whatever happens to it
later, a generation stays what it is, also when the engine is started anew. Knows no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from plait.adapters.bundle import Bundle, parse_bundle
from plait.adapters.draft_adapter import DraftFiles, open_draft
from plait.adapters.files import (
    BUNDLE,
    CONFIG,
    TOKENIZER_CONFIG,
    WEIGHTS,
    FileLimits,
    copy,
    open_directory,
    open_weights,
    read_header,
    read_small,
    write,
)
from plait.adapters.identity import DRAFT, generation_of
from plait.adapters.own_tokenizer import (
    OwnTokenizer,
    parse_own_tokenizer,
    read_own_tokenizer,
)
from plait.adapters.peft_config import PeftConfig, parse_config
from plait.platform.errors import AdapterFileTooLarge, AdapterStorageFailed, InvalidAdapter

_OURS = re.compile(r"[0-9a-f]{64}|incoming-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAdapter:
    """One generation on disk, its files checked as far as they can be without the model."""

    generation: str
    directory: Path
    num_bytes: int
    config: PeftConfig
    bundle: Bundle | None = None
    tokenizer: OwnTokenizer = field(default_factory=OwnTokenizer)

    @property
    def base_model(self) -> str:
        """The base that the config names."""
        return self.config.base_model

    @property
    def rank(self) -> int:
        """The largest rank that the config names."""
        return self.config.max_rank


class AdapterStore:
    """A private directory of generations. Any thread may call.

    Equal bytes are stored once. Each `add_…` takes one hold on its generation and each `remove`
    gives one back; with the last hold the files go.
    """

    def __init__(self, root: Path, limits: FileLimits | None = None) -> None:
        """Use `root`, which becomes this process's own; adapters left there are deleted."""
        self._root = root
        self._limits = limits or FileLimits()
        self._holds: dict[str, int] = {}
        self._lock = threading.Lock()
        with _storing():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            root.chmod(0o700)
            for left in root.iterdir():
                if _OURS.fullmatch(left.name):
                    _delete(left)

    def add_directory(self, source: Path, *, inside: Path | None = None) -> StoredAdapter:
        """Store the adapter in a directory; with `inside`, only one that truly lies there.

        Raises `InvalidAdapter` and the kinds of `AdapterError` about paths and files.
        """
        follow = inside is None
        with open_directory(source, inside=inside) as folder:
            small = {}
            for name in (CONFIG, BUNDLE):
                with contextlib.suppress(FileNotFoundError):
                    small[name] = read_small(
                        folder, name, limit=self._limits.of(name), follow_links=follow
                    )
            tokenizer = read_own_tokenizer(folder, self._limits, follow_links=follow)
            if tokenizer is not None:
                small[TOKENIZER_CONFIG] = tokenizer
            bundle = small.get(BUNDLE)
            with (
                open_weights(folder, self._limits, follow_links=follow) as weights,
                open_draft(folder, bundle, self._limits, follow_links=follow) as draft,
            ):
                return self._add(small, weights, draft=draft)

    def add_tensors(self, config: Mapping[str, Any] | bytes, weights: bytes) -> StoredAdapter:
        """Store an adapter given as a config and the bytes of a safetensors file."""
        raw = config if isinstance(config, bytes) else _as_json(config)
        for size, limit in (
            (len(raw), self._limits.config_bytes),
            (len(weights), self._limits.weights_bytes),
        ):
            if size > limit:
                raise AdapterFileTooLarge(f"{size:,} bytes; at most {limit:,} are read")
        return self._add({CONFIG: raw}, BytesIO(weights), size=len(weights))

    def remove(self, generation: str) -> None:
        """Give one hold back."""
        with self._lock:
            left = self._holds.get(generation, 0) - 1
            if left > 0:
                self._holds[generation] = left
                return
            if self._holds.pop(generation, None) is not None:
                _delete(self._root / generation)

    def close(self) -> None:
        """Delete everything."""
        with self._lock:
            self._holds.clear()
            _delete(self._root)

    def _add(
        self,
        small: Mapping[str, bytes],
        weights: BinaryIO,
        *,
        size: int | None = None,
        draft: DraftFiles | None = None,
    ) -> StoredAdapter:
        if CONFIG not in small:
            raise InvalidAdapter(f"{CONFIG} is missing")
        config = parse_config(small[CONFIG], self._limits)
        bundle = parse_bundle(small[BUNDLE], self._limits) if BUNDLE in small else None
        tokenizer = parse_own_tokenizer(small.get(TOKENIZER_CONFIG), self._limits)
        size = os.fstat(weights.fileno()).st_size if size is None else size
        with self._incoming() as folder:
            digests = {name: sha256(data).hexdigest() for name, data in small.items()}
            for name, data in small.items():
                with _storing():
                    (folder / name).write_bytes(data)
            digests[WEIGHTS] = self._copy_weights(weights, size, folder / WEIGHTS)
            if draft is not None:
                digests[DRAFT] = self._copy_draft(draft, folder / draft.name)
            generation = generation_of(digests)
            self._publish(folder, generation)
        return StoredAdapter(
            generation=generation,
            directory=self._root / generation,
            num_bytes=size + sum(map(len, small.values())),
            config=config,
            bundle=bundle,
            tokenizer=tokenizer,
        )

    def _copy_draft(self, draft: DraftFiles, folder: Path) -> str:
        parse_config(draft.config, self._limits)
        with _storing():
            folder.mkdir(mode=0o700)
            (folder / CONFIG).write_bytes(draft.config)
        size = os.fstat(draft.weights.fileno()).st_size
        weights = self._copy_weights(draft.weights, size, folder / WEIGHTS)
        return generation_of({CONFIG: sha256(draft.config).hexdigest(), WEIGHTS: weights})

    def _copy_weights(self, source: BinaryIO, size: int, path: Path) -> str:
        raw, _ = read_header(source, self._limits, size)
        digest = sha256(raw)
        with _storing(), path.open("xb") as target:
            write(target, raw)
            copy(source, target, size - len(raw), digest.update)
        return digest.hexdigest()

    @contextlib.contextmanager
    def _incoming(self) -> Iterator[Path]:
        """A directory to fill; what is still there afterwards is deleted."""
        folder = self._root / f"incoming-{uuid.uuid4().hex}"
        with _storing():
            # Whoever cleans temporary files may have taken it away.
            with contextlib.suppress(FileExistsError):
                self._root.mkdir(mode=0o700)
            folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            _delete(folder)

    def _publish(self, folder: Path, generation: str) -> None:
        with self._lock:
            stored = self._root / generation
            if generation not in self._holds or not _is_whole(stored, like=folder):
                _delete(stored)
                with _storing():
                    folder.rename(stored)
            self._holds[generation] = self._holds.get(generation, 0) + 1


@contextlib.contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AdapterStorageFailed(f"the store cannot be written: {error.strerror}") from None


def _is_whole(stored: Path, *, like: Path) -> bool:
    """Whether what was stored once is still there: nobody else should touch it, but some do."""
    try:
        return all(
            (stored / path.relative_to(like)).stat().st_size == path.stat().st_size
            for path in like.rglob("*")
            if path.is_file()
        )
    except OSError:
        return False


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _as_json(config: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(config, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidAdapter(f"the config cannot be written as JSON: {error}") from None
