"""What tells one checkpoint from another, without reading its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from plait.platform.errors import ModelUnsupported

# What a processor is made of.
_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_HEAD_BYTES = 1 << 20  # of each file of weights: its header, and some of them


def checkpoint_directory(model: str, revision: str | None) -> Path:
    """Where a model's checkpoint lies: a directory, or a hub id whose weights were fetched before.

    Raises `ModelUnsupported` where its processor's files cannot be had.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelUnsupported(
            f"the files of {model}'s image processor could not be fetched: {error}"
        ) from error


def checkpoint_digest(directory: Path) -> str:
    """SHA-256 (hex) over a checkpoint's config and, of its weights, sizes, times and beginnings.

    Neither its name nor where it lies counts. Two that differ in nothing of this are taken for the
    same: whoever edits weights in place changes their time.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        facts = path.stat()
        digest.update(f"\0{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
    return digest.hexdigest()
