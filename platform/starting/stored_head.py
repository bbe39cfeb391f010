"""The packed weights of a draft head, from beside those of its model.

A first start checks the head's tensors and quantises them, 0.2 s for the default one. What comes of
it is a function of the head's files, of the model as it was started (whose rows a head without its
own has), and of code; a later start with the same key reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.platform.errors import PlaitError
from plait.platform.model.locating import locate
from plait.platform.model.packed_cache import PackedCache, open_cache
from plait.platform.model.packed_file import Kept as KeptValue
from plait.platform.model.warm_start import files_of, key_of_start
from plait.platform.starting.notes import code, key_of
from plait.speculative import eagle_weights
from plait.speculative.eagle_weights import HeadWeights, Kept

if TYPE_CHECKING:
    from plait.platform.config import Options

MIN_BYTES = 1 << 20  # smaller heads are packed as fast as they are found


def recall_head(
    options: Options, path: Path, kept: Kept, make: Callable[[], HeadWeights]
) -> HeadWeights:
    """The weights of the head in `path` as an earlier start kept them, else what `make` makes.

    Args:
        options: Those that its model was started with.
        path: The head's directory.
        kept: What its matrices are kept as.
        make: Reads, checks and packs them.
    """
    cache = open_cache(options)
    key = None if cache is None else _key(cache, options, path, kept)
    if cache is None or key is None:
        return make()
    found = cache.load(key, copy=True)
    if found is not None:
        values: dict[str, Any] = {name: found.values.get(name) for name in _NAMES}
        return HeadWeights(**values)
    weights = make()
    if weights.num_bytes >= MIN_BYTES:
        cache.save(key, weights.num_bytes, _values(weights))
    return weights


_NAMES = tuple(field.name for field in dataclasses.fields(HeadWeights))


def _values(weights: HeadWeights) -> Iterator[tuple[str, KeptValue]]:
    for name in _NAMES:
        value = getattr(weights, name)
        if value is not None:
            yield name, value


def _key(cache: PackedCache, options: Options, path: Path, kept: Kept) -> str | None:
    """Names all that the weights depend on; None where it cannot be read."""
    try:
        model = key_of_start(options, locate(options))
        digests = [[file.name, cache.notes.digest(file)] for file in files_of(path)]
    except (OSError, PlaitError):  # whoever loads it says what is wrong
        return None
    if model is None:
        return None
    ours = code(Path(eagle_weights.__file__).parent, ())
    return key_of("draft head", model, digests, dataclasses.asdict(kept), ours)
