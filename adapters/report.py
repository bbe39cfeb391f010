"""What a load found, in numbers that tell a dead or exploded adapter from a good one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from plait.adapters.adapter import Adapter, LowRank, Rows, Whole
from plait.adapters.info import LoadReport, SiteReport


def make_report(
    adapter: Adapter, norms: Iterable[float], table_norms: Mapping[str, float]
) -> LoadReport:
    """Sites and sizes of an adapter; `norms` are those of its low-rank parts, in order."""
    tables = [_table_report(part, "rows", table_norms) for part in adapter.rows]
    tables += [_table_report(part, "whole", table_norms) for part in adapter.wholes]
    return LoadReport(
        sites=(*_low_rank_reports(zip(adapter.low_rank, norms, strict=True)), *tables),
        num_bytes=num_bytes(adapter),
    )


def _table_report(part: Rows | Whole, kind: str, norms: Mapping[str, float]) -> SiteReport:
    name = part.site.name
    return SiteReport(name=name, kind=kind, rank=0, scale=1.0, change_norm=norms[name])


def _low_rank_reports(parts: Iterable[tuple[LowRank, float]]) -> list[SiteReport]:
    """One line for each site; experts are one, their norms together."""
    by_site: dict[str, list[tuple[LowRank, float]]] = {}
    for part, norm in parts:
        by_site.setdefault(part.site.name, []).append((part, norm))
    return [
        SiteReport(
            name=name,
            kind="low_rank" if found[0][0].magnitude is None else "dora",
            rank=max(part.a.shape[0] for part, _ in found),
            scale=found[0][0].scale,
            change_norm=math.hypot(*(norm for _, norm in found)),
        )
        for name, found in by_site.items()
    ]


def change_norm(part: LowRank) -> float:
    """‖scale · b a‖, without the product: ‖b a‖² = Σ (bᵀ b) ∘ (a aᵀ)."""
    squared = _squared_norm(part.a.float(), part.b.float())
    if not math.isfinite(squared):  # beyond fp32, though every value is within
        squared = _squared_norm(part.a.double(), part.b.double())
    return abs(part.scale) * math.sqrt(max(squared, 0.0))


def _squared_norm(a: Tensor, b: Tensor) -> float:
    return float(((b.T @ b) * (a @ a.T)).sum())


def is_change(part: LowRank) -> bool:
    """Whether the part does anything; with a magnitude only the base could tell."""
    if part.magnitude is not None:
        return True
    if part.scale == 0.0:
        return False
    has_product = bool(part.a.any()) and bool(part.b.any())
    return has_product or (part.b_bias is not None and bool(part.b_bias.any()))


def num_bytes(adapter: Adapter) -> int:
    """Bytes of all tensors of an adapter; rows that two sites share count once."""
    tensors: list[Tensor | None] = []
    for part in adapter.low_rank:
        tensors += [part.a, part.b, part.b_bias, part.magnitude]
    for rows in adapter.rows:
        tensors += [rows.rows, rows.token_ids]
    for whole in adapter.wholes:
        tensors += [whole.weight, whole.bias]
    found = {(t.data_ptr(), t.nbytes): t.nbytes for t in tensors if t is not None}
    return sum(found.values())
