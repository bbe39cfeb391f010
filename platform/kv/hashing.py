"""Content keys of blocks: a SHA-256 chain over a canonical encoding.

    root  = H(domain, block size, salt, adapter generation)
    key_i = H(key_{i-1}, tokens of block i, extras of block i)

Two blocks have one key only if everything before them and in them agrees: Python's `hash()`
collides on purpose-made tokens, and a pickle of equal values may differ. Salt and generation
stand in the root alone, since the chain carries them; a generation is a content digest, never a
name. Extras are what tokens do not tell, such as an image's content under its placeholders.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as SequenceOf
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.core import Request

_DOMAIN = b"plait.kv.1"


def _framed(value: str | None) -> bytes:
    """Encode so that no two lists of values run together; None differs from the empty string."""
    if value is None:
        return b"\x00"
    data = value.encode("utf-8", "surrogatepass")
    return b"\x01" + struct.pack("<Q", len(data)) + data


def root_key(request: Request, block_size: int) -> bytes:
    """The parent of a sequence's first block."""
    parts = (_framed(request.cache_salt), _framed(request.adapter))
    return sha256(_DOMAIN + struct.pack("<I", block_size) + b"".join(parts)).digest()


def block_extras(request: Request, start: int, stop: int) -> bytes:
    """What decides K and V of tokens start … stop - 1 beside tokens and chain.

    Nothing yet. Images will put (content hash, offset in the block, processor settings) here;
    until then the scheduler refuses requests with images, so that none can hit a wrong block.
    """
    del request, start, stop
    return b""


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
