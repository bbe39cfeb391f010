"""Reading files that nobody has checked: by descriptor, within limits, and only plain files.

A directory is opened once and its files are opened relative to that descriptor, so that nothing
can be exchanged between a check and its use. Inside a jail no component may be a symbolic link.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from plait.adapters.header import HeaderError, SafetensorsHeader, header_size, parse_header
from plait.platform.errors import (
    AdapterFileChanged,
    AdapterFileTooLarge,
    AdapterPathForbidden,
    AdapterPathNotFound,
    AdapterStorageFailed,
    InvalidAdapter,
)

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BUNDLE = "plait_adapter.json"
# What training saves of its tokenizer: see `own_tokenizer`.
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

_CHUNK = 1 << 20
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
_SHARDS = "adapter_model.safetensors.index.json"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """How large things may be before they are refused."""

    config_bytes: int = 1 << 20
    bundle_bytes: int = 1 << 20
    header_bytes: int = 16 << 20
    tokenizer_bytes: int = 64 << 20
    tokenizer_config_bytes: int = 8 << 20  # and the small files beside it
    weights_bytes: int = 8 << 30
    json_depth: int = 64

    def of(self, name: str) -> int:
        """How large a file of that name may be."""
        own = {
            CONFIG: self.config_bytes,
            BUNDLE: self.bundle_bytes,
            TOKENIZER: self.tokenizer_bytes,
            WEIGHTS: self.weights_bytes,
        }
        return own.get(name, self.tokenizer_config_bytes)


@contextmanager
def open_directory(path: Path, *, inside: Path | None = None) -> Iterator[int]:
    """A descriptor of the directory at `path`; with `inside`, never one that lies elsewhere.

    A relative path counts from `inside`. There no component may be "..", or a symbolic link.
    Raises `AdapterPathNotFound`, `AdapterPathForbidden`, or `InvalidAdapter` for what is none.
    """
    if "\0" in str(path):
        raise AdapterPathNotFound("a path holds no NUL characters", param="lora_path")
    descriptor = _open_folder(path) if inside is None else _open_jailed(path, inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def open_inner(directory: int, name: str, *, follow_links: bool = False) -> Iterator[int]:
    """A descriptor of a directory in an open one."""
    flags = 0 if follow_links else os.O_NOFOLLOW
    descriptor = _open_folder(Path(name), within=directory, flags=flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(path: Path, *, within: int | None = None, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | flags, dir_fd=within)
    except FileNotFoundError:
        raise AdapterPathNotFound(f"there is no adapter at {path.name!r}") from None
    except NotADirectoryError:
        _refuse_link(path, within, flags)
        raise InvalidAdapter(
            f"{path.name!r} is not a directory; an adapter is one, with {CONFIG} and {WEIGHTS}"
        ) from None
    except PermissionError:
        raise AdapterPathForbidden(f"{path.name!r} may not be read") from None
    except OSError as error:  # ELOOP, ENAMETOOLONG, EIO
        _refuse_link(path, within, flags)
        raise AdapterPathNotFound(f"{path.name!r} cannot be opened: {error.strerror}") from None


def _refuse_link(path: Path, within: int | None, flags: int) -> None:
    if flags & os.O_NOFOLLOW and _is_link(path, within):
        raise AdapterPathForbidden(f"{path.name!r} is a symbolic link") from None


def _is_link(path: Path, within: int | None) -> bool:
    try:
        return stat.S_ISLNK(os.stat(path, dir_fd=within, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _open_jailed(path: Path, inside: Path) -> int:
    if path.is_absolute():
        if not path.is_relative_to(inside):
            raise AdapterPathForbidden("the path leads out of the adapter directory")
        path = path.relative_to(inside)
    if not path.parts or ".." in path.parts:
        raise AdapterPathForbidden("the path leads out of the adapter directory")
    descriptor = _open_folder(inside)
    for part in path.parts:
        try:
            inner = _open_folder(Path(part), within=descriptor, flags=os.O_NOFOLLOW)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


@contextmanager
def open_file(
    directory: int, name: str, *, limit: int, follow_links: bool = False
) -> Iterator[BinaryIO]:
    """A plain file of an open directory, at most `limit` bytes long, unchanged while it is read.

    Raises FileNotFoundError where there is none.
    """
    with _plain_file(directory, name, follow_links) as file:
        before = os.fstat(file.fileno())
        if before.st_size > limit:
            raise AdapterFileTooLarge(
                f"{name} has {before.st_size:,} bytes; at most {limit:,} are read"
            )
        yield file
        if _identity(os.fstat(file.fileno())) != _identity(before):
            raise AdapterFileChanged(f"{name} changed while it was read; load it again")


@contextmanager
def _plain_file(directory: int, name: str, follow_links: bool) -> Iterator[BinaryIO]:
    # Without O_NONBLOCK, opening a named pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(
            name, flags if follow_links else flags | os.O_NOFOLLOW, dir_fd=directory
        )
    except FileNotFoundError:
        raise
    except OSError as error:
        if _is_link(Path(name), directory):
            raise AdapterPathForbidden(f"{name} is a symbolic link") from None
        raise InvalidAdapter(f"{name} cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidAdapter(f"{name} is not a plain file")
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        yield file


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def open_weights(
    directory: int, limits: FileLimits, *, follow_links: bool = False
) -> Iterator[BinaryIO]:
    """The weights of an open directory. Raises `InvalidAdapter` where there are none to read."""
    try:
        opened = open_file(
            directory, WEIGHTS, limit=limits.weights_bytes, follow_links=follow_links
        )
        with opened as file:
            yield file
    except FileNotFoundError:
        refuse_other_formats(directory)


def read_small(directory: int, name: str, *, limit: int, follow_links: bool = False) -> bytes:
    """All of a small file. Raises FileNotFoundError where there is none."""
    with open_file(directory, name, limit=limit, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        return read_exactly(file, size, name)


def read_exactly(file: BinaryIO, size: int, name: str) -> bytes:
    """The next `size` bytes. Raises `AdapterFileChanged` where the file ends before."""
    parts = []
    while size:
        part = file.read(min(size, _CHUNK))
        if not part:
            raise AdapterFileChanged(f"{name} became shorter while it was read; load it again")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_header(
    file: BinaryIO, limits: FileLimits, size: int | None = None
) -> tuple[bytes, SafetensorsHeader]:
    """The header of an open safetensors file, raw and parsed. Leaves the file at the data.

    `size` is the file's, where it has no descriptor to ask. Raises `InvalidAdapter` unless every
    tensor lies inside the file and none overlap.
    """
    size = os.fstat(file.fileno()).st_size if size is None else size
    try:
        length = header_size(read_exactly(file, min(8, size), WEIGHTS), size, limits.header_bytes)
        raw = read_exactly(file, length, WEIGHTS)
        parsed = parse_header(parse_json(raw, WEIGHTS, limits), size - 8 - length)
    except HeaderError as error:
        raise InvalidAdapter(f"{WEIGHTS}: {error}") from None
    return length.to_bytes(8, "little") + raw, parsed


def copy(source: BinaryIO, target: BinaryIO, size: int, seen: Callable[[bytes], None]) -> None:
    """Copy the next `size` bytes, and show each piece to `seen`."""
    while size:
        part = read_exactly(source, min(size, _CHUNK), WEIGHTS)
        seen(part)
        write(target, part)
        size -= len(part)


def write(target: BinaryIO, data: bytes) -> None:
    """Write all of `data`. Raises `AdapterStorageFailed`."""
    try:
        target.write(data)
    except OSError as error:
        raise AdapterStorageFailed(f"the store cannot be written: {error.strerror}") from None


def refuse_other_formats(directory: int) -> None:
    """Say what is there in the place of the weights. Always raises `InvalidAdapter`."""
    names = set(os.listdir(directory))
    if _SHARDS in names or any(n.startswith("adapter_model-0") for n in names):
        raise InvalidAdapter(f"the weights are in several files; save them as one {WEIGHTS}")
    pickles = sorted(n for n in names if n in _PICKLES or n.endswith((".bin", ".pt", ".pth")))
    if pickles:
        raise InvalidAdapter(
            f"{pickles[0]} is a pickle, which can run code and is never opened; "
            f"save the adapter as {WEIGHTS}"
        )
    raise InvalidAdapter(f"{WEIGHTS} is missing")


def parse_json(data: bytes, name: str, limits: FileLimits) -> Any:
    """JSON without duplicate keys, deep nesting, NaN, infinities, or text that is no Unicode.

    Raises `InvalidAdapter`.
    """
    if _depth(data) > limits.json_depth:
        raise InvalidAdapter(f"{name} nests deeper than {limits.json_depth} levels")
    try:
        content = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        if _SURROGATE.search(data):
            # Half of a pair cannot be written as UTF-8, and so not be told to another process.
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{name} is not JSON: {str(error)[:200]}") from None


def _depth(data: bytes) -> int:
    """How deep brackets nest, strings aside; the parser itself recurses."""
    depth = deepest = 0
    for byte in _STRING.sub(b"", data).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:100]!r} stands twice in one object")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")
