"""Full attention within segments of rows, as vision towers attend within images and windows.

The segments of a call stand one behind the other and may all differ in length. Each row sees every
key of its segment. ``csrc/varlen_attention.h`` tells the order of computation, by which a row has
the same bits whatever other segments there are.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from plait.platform.ops._native import has_kernels


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """Returns softmax(scale · q · Kᵀ) · V per row and head, [T, H, D] in the query's dtype.

    Args:
        query: [T, H, D], fp32 or bf16; heads and rows may lie apart.
        key: [keys, H, D] of the query's dtype; likewise.
        value: As key.
        query_bounds: int32 [S + 1]: rows of segment s are query_bounds[s]:query_bounds[s + 1].
        key_bounds: int32 [S + 1]: its keys; by default as the rows. Rows of a segment without keys
            become zero.
        scale: Multiplies q · k; positive.

    Raises:
        RuntimeError: An argument does not fit; the message names it.
    """
    key_bounds = query_bounds if key_bounds is None else key_bounds
    if query.device.type == "cpu" and _use_kernel():
        out: Tensor = torch.ops.plait.varlen_attention(
            query, key, value, query_bounds, key_bounds, scale
        )
        return out
    return reference_varlen_attention(query, key, value, query_bounds, key_bounds, scale=scale)


def reference_varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """`varlen_attention` by torch's attention, segment by segment; on a CPU in fp32."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    rows = query_bounds.tolist()
    keys = rows if key_bounds is None else key_bounds.tolist()
    for s in range(len(rows) - 1):
        if keys[s] == keys[s + 1]:
            continue
        parts = (query[rows[s] : rows[s + 1]], *(x[keys[s] : keys[s + 1]] for x in (key, value)))
        if query.device.type == "cpu":
            parts = tuple(part.float() for part in parts)
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        out[rows[s] : rows[s + 1]] = attended[0].transpose(0, 1).to(query.dtype)
    return out


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """How far an output may lie from the exact one, for values V of size about one.

    As of `paged_attention`: probabilities err by some 1e-6, since scores are sums of D products in
    fp32 that reach about 10, and in bf16 the output is rounded once, by half a unit of its 8 bits.
    """
    return {"atol": 2e-5, "rtol": 1e-5 if dtype is torch.float32 else 2.0**-8}


def example_varlen(
    lengths: tuple[int, ...],
    *,
    num_heads: int = 3,
    head_size: int = 64,
    dtype: torch.dtype = torch.float32,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random positional arguments of `varlen_attention` for segments of these lengths."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    shape = (3, int(bounds[-1]), num_heads, head_size)
    query, key, value = torch.randn(shape, generator=generator).to(dtype)
    return query, key, value, bounds


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::varlen_attention", _fake)
    return True


def _fake(
    query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor, key_bounds: Tensor,
    scale: float,
) -> Tensor:  # fmt: skip
    del key, value, query_bounds, key_bounds, scale
    return query.new_empty(query.shape)
