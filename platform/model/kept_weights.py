"""A model's weights: from the packed cache, or else from its checkpoint, and kept for the next."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

from plait.platform.config import Options
from plait.platform.model.build import Skeleton
from plait.platform.model.filling import kept_values, put_values, read_weights
from plait.platform.model.packed_cache import PackedCache, has_memory_for, open_cache, said
from plait.platform.model.source import Checkpoint
from plait.platform.model.tensor_files import safetensors_paths
from plait.platform.starting.notes import key_of

LAYOUT = 4  # changes with what `pack_linear` or `pack_quantized` lay out
MIN_BYTES = 16 << 20  # smaller weights are packed as fast as they are found


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where weights came from."""

    text: str  # for the banner
    mapped_bytes: int = 0
    key: str | None = None  # under which the cache has them


def fill(
    skeleton: Skeleton, checkpoint: Checkpoint, options: Options, advance: Callable[[], None]
) -> Origin:
    """Give the model its weights: from the cache, or else from the checkpoint, and keep them."""
    began = time.monotonic()
    num_bytes = sum(skeleton.bytes_by_format().values())
    cache = _cache_for(options, num_bytes)
    key = None if cache is None else _key(cache, skeleton, checkpoint)
    copy = has_memory_for(num_bytes)
    kept = None if cache is None or key is None else cache.load(key, copy=copy)
    if kept is not None:
        put_values(skeleton, kept.values)
        text = said(time.monotonic() - began, kept.mapped_bytes)
        return Origin(text=text, mapped_bytes=kept.mapped_bytes, key=key)
    read_weights(skeleton, advance)
    text = f"read in {time.monotonic() - began:.1f} s"
    if cache is None or key is None or not cache.save(key, num_bytes, kept_values(skeleton)):
        return Origin(text=text)
    kept = cache.load(key, copy=True) if has_memory_for(num_bytes) else None
    if kept is not None:  # as every later start has them: in huge pages
        put_values(skeleton, kept.values)
    return Origin(text=f"{text}, kept packed for the next start", key=key)


def _cache_for(options: Options, num_bytes: int) -> PackedCache | None:
    return open_cache(options) if MIN_BYTES <= num_bytes <= options.packed_cache_bytes else None


def _key(cache: PackedCache, skeleton: Skeleton, checkpoint: Checkpoint) -> str | None:
    """Names all that the packed weights depend on; None where that cannot be read."""
    try:
        digests = [cache.notes.digest(path) for path in _files(checkpoint)]
    except OSError:
        return None
    recipe = skeleton.recipe
    parts = [
        LAYOUT,
        platform.machine(),
        digests,
        recipe.activations,
        sorted((name, astuple(form)) for name, form in recipe.formats.items()),
        [(name, list(t.shape), str(t.dtype)) for name, t in skeleton.parameters.items()],
        [owner.names for owner in skeleton.leaves.merged],
        sorted(skeleton.plan.tied.items()),
    ]
    return key_of(*parts)


def _files(checkpoint: Checkpoint) -> list[Path]:
    if checkpoint.is_gguf:
        return [checkpoint.path]
    return [checkpoint.path / "config.json", *safetensors_paths(checkpoint.path)]
