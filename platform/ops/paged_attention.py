"""Causal attention of a step's rows over paged K and V.

The rows of a span are consecutive tokens of one sequence: one for a decode, a few for drafts to
verify, many for a chunk of a prompt; the op does not tell them apart. K and V of the span itself
are in the pages already. ``csrc/paged_attention.h`` tells the order of computation, by which a row
has the same bits whatever else the step computes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from plait.platform.ops._native import has_kernels
from plait.platform.ops.kv_codes import from_codes


def paged_attention(  # noqa: PLR0913 - the tensors of one step, each of its own kind
    query: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns softmax(scale · q · Kᵀ) · V per row and head, [T, Hq, D] in the query's dtype.

    Row r of span s stands at position seq_lens[s] - (rows of s) + r and sees the positions
    max(0, position - window + 1) … position; a row inside a range sees on to the range's end.

    Args:
        query: [T, Hq, D] of the pages' dtype, or beside int8 fp32 or bf16; heads and rows may lie
            apart. Hq is a multiple of Hkv, and neighbouring query heads share a KV head.
        pages: [num_blocks, L, 2, Hkv, block_size, D], fp32 or bf16, contiguous. Or int8 with D + 4
            in the last place, see `kv_codes`.
        layer: Index within the group.
        block_table: int32 [S, B]. Only blocks that some row of the span sees are read; these may
            not be the null block 0.
        query_start: int32 [S + 1]: rows of span s are query_start[s]:query_start[s+1].
        seq_lens: int32 [S], with this step's rows.
        scale: Multiplies q · k; positive.
        window: Positions a row sees, itself included; None: all before it.
        softcap: Scores become softcap · tanh(score / softcap).
        sinks: [Hq]: a logit per head that takes its share of the softmax and has no value.
        ranges: int32 [N, 3]: (span, start, end), positions of the span's sequence whose tokens see
            each other. Ascending, apart, and within seq_lens. The window bounds what lies behind.

    Raises:
        RuntimeError: An argument does not fit; the message names it.
    """
    if sinks is not None and sinks.dtype is not torch.float32:
        sinks = sinks.float()
    if query.device.type == "cpu" and _use_kernel():
        out: torch.Tensor = torch.ops.plait.paged_attention(
            query,
            pages,
            layer,
            block_table,
            query_start,
            seq_lens,
            scale,
            window,
            softcap,
            sinks,
            *(() if ranges is None else (ranges,)),
        )
        return out
    return reference_paged_attention(
        query,
        pages,
        layer,
        block_table,
        query_start,
        seq_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        ranges=ranges,
    )


def reference_paged_attention(  # noqa: PLR0913 - as above
    query: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` span by span in plain torch and fp32: right, but slow."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    group = query.shape[1] // pages.shape[3]
    for span, length in enumerate(seq_lens.tolist()):
        start, stop = query_start[span : span + 2].tolist()
        if start == stop:
            continue
        positions = torch.arange(length - (stop - start), length, device=query.device)
        first = 0 if window is None else max(0, int(positions[0]) - window + 1)
        k, v = gather_keys(pages, layer, block_table[span], first, length)
        k, v = (x.float().repeat_interleave(group, dim=0) for x in (k, v))

        scores = torch.einsum("thd,hkd->htk", query[start:stop].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = positions[:, None] - torch.arange(first, length, device=query.device)
        ends = positions + 1
        for of_span, first_of_range, end in () if ranges is None else ranges.tolist():
            if of_span == span:
                ends[(positions >= first_of_range) & (positions < end)] = end
        seen = torch.arange(first, length, device=query.device) < ends[:, None]
        if window is not None:
            seen &= behind < window
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks[:, None, None].expand(-1, stop - start, 1)
            probabilities = torch.cat([scores, sink], dim=2).softmax(dim=2)[:, :, :-1]
        else:
            probabilities = scores.softmax(dim=2)
        out[start:stop] = torch.einsum("htk,hkd->thd", probabilities, v).to(query.dtype)
    return out


def gather_keys(
    pages: torch.Tensor, layer: int, blocks: torch.Tensor, first: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V at positions first … length - 1 of one sequence, each [Hkv, keys, D]."""
    block_size = pages.shape[4]
    at = torch.arange(first, length, device=pages.device)
    block, slot = blocks[at // block_size].long(), at % block_size
    kept = [pages[block, layer, half, :, slot].transpose(0, 1) for half in (0, 1)]
    k, v = (from_codes(x) for x in kept) if pages.dtype is torch.int8 else kept
    return k, v


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """How far an output may lie from the exact one, for values V of size about one.

    An output is a mean of V, so its error is that of the probabilities plus its own rounding.
    Scores are sums of D products in fp32 and reach about 10: an error of some 1e-6 in the
    exponent, and so in each probability. In bf16 the inputs are exact, the sums again fp32, and
    the output is rounded once, by at most half a unit of its 8 bits: 2⁻⁸ of the value.
    """
    return {"atol": 2e-5, "rtol": 1e-5 if dtype is torch.float32 else 2.0**-8}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What `example_attention` makes: spans as (rows, sequence length)."""

    spans: tuple[tuple[int, int], ...]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


def example_attention(
    shape: AttentionShape, *, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random positional arguments of `paged_attention`: scattered blocks, one layer of two."""
    counts = [-(-length // shape.block_size) for _, length in shape.spans]
    ids = torch.randperm(sum(counts), generator=generator).to(torch.int32) + 1
    block_table = torch.zeros(len(counts), max(counts, default=0), dtype=torch.int32)
    for row, blocks in zip(block_table, ids.split(counts) if counts else (), strict=True):
        row[: len(blocks)] = blocks
    rows = torch.tensor([0, *(rows for rows, _ in shape.spans)])
    query_start = rows.cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([length for _, length in shape.spans], dtype=torch.int32)
    page = (2, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
    pages = torch.randn(sum(counts) + 1, *page, generator=generator).to(shape.dtype)
    query_shape = (int(query_start[-1]), shape.num_heads, shape.head_size)
    query = torch.randn(query_shape, generator=generator).to(shape.dtype)
    return query, pages, 1, block_table, query_start, seq_lens


@functools.cache
def _use_kernel() -> bool:
    if not has_kernels():
        return False
    torch.library.register_fake("plait::paged_attention", _fake)
    return True


def _fake(  # noqa: PLR0913 - the op's signature
    query: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    ranges: torch.Tensor | None = None,
) -> torch.Tensor:
    del pages, layer, block_table, query_start, seq_lens, scale, window, softcap, sinks, ranges
    return query.new_empty(query.shape)
