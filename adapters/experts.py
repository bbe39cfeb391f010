"""Low-rank changes of experts: PEFT's stacked tensors taken apart, single experts' put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from plait.adapters.adapter import LowRank
from plait.adapters.plan import Layout, LowRankPlan
from plait.platform.errors import AdapterRankExceeded


def split_experts(plan: LowRankPlan, a: Tensor, b: Tensor) -> list[LowRank]:
    """One change for each expert of a stacked pair.

    a is [E·r, in] with the expert slowest, b is [out, r·E] with the expert fastest. Where the
    writer took inputs for outputs, the product came out transposed: then a and b trade places.
    """
    site, rank = plan.target.site, plan.rank
    a_by_expert = a.view(site.num_experts, rank, a.shape[1])
    b_by_expert = b.view(b.shape[0], rank, site.num_experts).permute(2, 0, 1)
    if plan.layout is Layout.EXPERTS_SWAPPED:
        a_by_expert, b_by_expert = b_by_expert.transpose(1, 2), a_by_expert.transpose(1, 2)
    a_by_expert, b_by_expert = a_by_expert.contiguous(), b_by_expert.contiguous()
    return [
        LowRank(site=site, a=a_by_expert[e], b=b_by_expert[e], scale=plan.scale, expert=e)
        for e in range(site.num_experts)
    ]


def join_halves(parts: Iterable[tuple[int, LowRank]], max_rank: int) -> list[LowRank]:
    """One change for each expert of which gate or up, or both, are changed as halves.

    Ranks add up: a is stacked, b is block-diagonal. The scale is explicit, so that the sum of
    ranks does not change it; where the halves' scales differ, the second's b carries the ratio.
    """
    by_place: dict[tuple[str, int | None], list[tuple[int, LowRank]]] = {}
    for half, part in parts:
        by_place.setdefault((part.site.name, part.expert), []).append((half, part))
    return [_join(found, max_rank) for found in by_place.values()]


def _join(halves: list[tuple[int, LowRank]], max_rank: int) -> LowRank:
    first = halves[0][1]
    rank, size = sum(part.a.shape[0] for _, part in halves), first.site.out_features // 2
    if rank > max_rank:
        raise AdapterRankExceeded(
            f"{first.site.name}: gate and up of one expert have {rank} ranks together, and this "
            f"server's limit is {max_rank}; raise --max-adapter-rank"
        )
    scale = first.scale or 1.0
    same = all(part.scale == first.scale for _, part in halves) and first.scale != 0.0
    dtype = first.b.dtype if same else torch.float32
    b = torch.zeros(first.site.out_features, rank, dtype=dtype)
    column = 0
    for half, part in halves:
        ratio = 1.0 if same else part.scale / scale
        width = part.b.shape[1]
        rows = slice(half * size, (half + 1) * size)
        b[rows, column : column + width] = part.b.to(dtype) * ratio
        column += width
    return replace(first, a=torch.cat([part.a for _, part in halves]), b=b, scale=scale)
