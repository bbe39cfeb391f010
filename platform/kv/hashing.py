"""Content keys of blocks: a SHA-256 chain over a canonical encoding.

    root  = H(domain, block size, salt)
    key_i = H(key_{i-1}, tokens of block i, extras of block i)

Two blocks have one key only if everything before them and in them agrees: Python's `hash()`
collides on purpose-made tokens, and a pickle of equal values may differ. The salt stands in the
root alone, since the chain carries it. Extras are what tokens do not tell: the adapters that can
change K or V of the block, by content and never by name, and images under their placeholders, with
what adapters make of them. Where tokens see later ones (`Request.spans`), K and V of a block hang
on all of the span, so its extras are those of the block and of all spans that touch it.

Blocks before an adapter is active are the base model's, and so are all blocks of an adapter that
cannot change K or V, unless an adapter of the draft model goes with it: the draft model keeps its
own K and V under the same block numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as SequenceOf
from hashlib import sha256
from typing import TYPE_CHECKING

from plait.platform.image_rows import touched, tower_uses

if TYPE_CHECKING:
    from plait.platform.core import ImageItem, Request

_DOMAIN = b"plait.kv.3"
_ADAPTER, _IMAGE, _TOWER = b"adapter", b"image", b"tower"
_SPAN, _DIGEST = b"span", b"digest"


def _framed(value: str) -> bytes:
    """Encode so that no two lists of values run together."""
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def root_key(request: Request, block_size: int) -> bytes:
    """The parent of a sequence's first block."""
    salt = _framed(request.cache_salt)
    return sha256(_DOMAIN + struct.pack("<I", block_size) + salt).digest()


def block_extras(request: Request, start: int, stop: int) -> bytes:
    """What decides K and V of tokens start … stop - 1 beside tokens and chain."""
    if not request.images and not request.spans:
        return _adapters(request, start, stop)
    met = [span for span in request.spans if span[0] < stop and span[1] > start]
    first = min((start, *(begin for begin, _ in met)))
    last = max((stop, *(end for _, end in met)))
    return b"".join(
        (
            _adapters(request, start, last),
            *(_image(request, item, start) for item in touched(request, first, last)),
            *(_SPAN + struct.pack("<qq", span[0] - start, span[1] - start) for span in met),
            _DIGEST + _framed(request.vision_digest) if request.vision_digest else b"",
        )
    )


def _adapters(request: Request, start: int, stop: int) -> bytes:
    return b"".join(
        _ADAPTER
        + _framed(use.kv_digest)
        + _framed(use.draft)
        + struct.pack("<dI", use.scale, max(0, use.active_from - start))
        for use in request.adapters
        if (use.kv_digest or use.draft) and use.active_from < stop
    )


def _image(request: Request, item: ImageItem, start: int) -> bytes:
    """An image by its content, its place, and what adapters do to its embeddings."""
    return (
        _IMAGE
        + _framed(item.key)
        + struct.pack("<q", item.start - start)
        + b"".join(
            _TOWER + _framed(digest) + struct.pack("<d", scale)
            for digest, scale in tower_uses(request, item)
        )
    )


class KeyChain:
    """The keys of one sequence's full blocks, each computed once and in order."""

    __slots__ = ("_block_size", "_pack", "_request", "_root", "keys")

    def __init__(self, request: Request, block_size: int) -> None:
        self._request = request
        self._block_size = block_size
        self._pack = struct.Struct(f"<{block_size}I").pack
        self._root = root_key(request, block_size)
        self.keys: list[bytes] = []

    def extend(self, tokens: SequenceOf[int], num_blocks: int) -> list[bytes]:
        """Have the keys of the first `num_blocks` blocks, all of whose tokens are known."""
        keys, size = self.keys, self._block_size
        parent = keys[-1] if keys else self._root
        for start in range(len(keys) * size, num_blocks * size, size):
            stop = start + size
            extras = block_extras(self._request, start, stop)
            parent = sha256(parent + self._pack(*tokens[start:stop]) + extras).digest()
            keys.append(parent)
        return keys

    def copy(self, num_blocks: int) -> KeyChain:
        """A chain of the same request that begins with the same `num_blocks` keys."""
        chain = KeyChain(self._request, self._block_size)
        chain.keys = self.keys[:num_blocks]
        return chain
