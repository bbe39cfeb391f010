"""Content keys of what an adapter does to a part of the model, for caches that hold that part."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from hashlib import sha256

import torch
from torch import Tensor

from plait.adapters.adapter import LowRank, Rows, Whole
from plait.adapters.sites import Site, SiteKind, SitePart

Part = LowRank | Rows | Whole


def kv_digest(parts: Iterable[Part]) -> str:
    """SHA-256 (hex) of all that can change a cached K or V; empty where nothing can.

    What changes K and V by way of images alone is told by `tower_digest`.
    """
    return _digest(b"plait.adapter.kv.1", (p for p in parts if _reaches_kv(p.site)))


def _reaches_kv(site: Site) -> bool:
    return site.affects_kv and site.kind != SiteKind.HEAD and site.part == SitePart.LANGUAGE


def tower_digest(parts: Iterable[Part]) -> str:
    """SHA-256 (hex) of all that changes the tower or projector; empty where nothing does."""
    return _digest(
        b"plait.adapter.tower.1",
        (p for p in parts if p.site.part != SitePart.LANGUAGE),
    )


def _digest(domain: bytes, parts: Iterable[Part]) -> str:
    """Of parts in an order that does not depend on the file's."""
    found = sorted(parts, key=lambda p: (p.site.name, type(p).__name__, _expert(p)))
    if not found:
        return ""
    digest = sha256(domain)
    for part in found:
        for piece in _encoded(part):
            digest.update(piece)
    return digest.hexdigest()


def _encoded(part: Part) -> Iterator[bytes | memoryview]:
    """A part so that no two parts, or lists of them, have the same bytes."""
    name = part.site.name.encode()
    kind = type(part).__name__.encode()
    yield struct.pack("<III", len(name), len(kind), _expert(part) + 1) + name + kind
    tensors: tuple[Tensor | None, ...]
    if isinstance(part, LowRank):
        yield struct.pack("<d", part.scale)
        tensors = (part.a, part.b, part.b_bias, part.magnitude)
    elif isinstance(part, Rows):
        tensors = (part.token_ids, part.rows)
    else:
        tensors = (part.weight, part.bias)
    for tensor in tensors:
        about = b"" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".encode()
        yield struct.pack("<I", len(about)) + about
        if tensor is not None:
            yield tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _expert(part: Part) -> int:
    expert = part.expert if isinstance(part, LowRank) else None
    return -1 if expert is None else expert
