"""What a load found, in numbers that tell a dead or exploded adapter from a good one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from plait.adapters.adapter import Adapter, LowRank, Rows, Whole
from plait.adapters.digests import is_change, kv_digest, tower_digest
from plait.adapters.info import LoadReport, SiteReport
from plait.adapters.sites import Site, SiteKind


def make_report(
    adapter: Adapter,
    *,
    num_tensors: int,
    table_norms: Mapping[str, float],
    changes_vocabulary: bool,
    warnings: tuple[str, ...],
) -> LoadReport:
    """The report of an adapter that was made."""
    tables = [_table_report(part, "rows", table_norms) for part in adapter.rows]
    tables += [_table_report(part, "whole", table_norms) for part in adapter.wholes]
    return LoadReport(
        sites=(*_low_rank_reports(adapter.low_rank), *tables),
        num_tensors=num_tensors,
        changes_kv=bool(kv_digest(adapter)),
        changes_tower=bool(tower_digest(adapter)),
        changes_head=any(site.kind == SiteKind.HEAD for site in sites_of(adapter)),
        changes_vocabulary=changes_vocabulary,
        num_bytes=num_bytes(adapter),
        warnings=warnings,
    )


def sites_of(adapter: Adapter) -> set[Site]:
    """All sites that an adapter has something for."""
    low_rank = {part.site for part in adapter.low_rank}
    rows, wholes = {part.site for part in adapter.rows}, {part.site for part in adapter.wholes}
    return low_rank | rows | wholes


def _table_report(part: Rows | Whole, kind: str, norms: Mapping[str, float]) -> SiteReport:
    name = part.site.name
    return SiteReport(name=name, kind=kind, rank=0, scale=1.0, change_norm=norms[name])


def _low_rank_reports(parts: Iterable[LowRank]) -> list[SiteReport]:
    """One line for each site; experts are one, their norms together."""
    by_site: dict[str, list[LowRank]] = {}
    for part in parts:
        by_site.setdefault(part.site.name, []).append(part)
    return [
        SiteReport(
            name=name,
            kind="low_rank" if found[0].magnitude is None else "dora",
            rank=max(part.a.shape[0] for part in found),
            scale=found[0].scale,
            change_norm=math.hypot(*(change_norm(part) for part in found)),
        )
        for name, found in by_site.items()
    ]


def change_norm(part: LowRank) -> float:
    """‖scale · b a‖, without the product: ‖b a‖² = Σ (bᵀ b) ∘ (a aᵀ)."""
    a, b = part.a.float(), part.b.float()
    squared = float(((b.T @ b) * (a @ a.T)).sum(dtype=a.dtype))
    return abs(part.scale) * math.sqrt(max(squared, 0.0))


def changes_nothing(adapter: Adapter) -> bool:
    """Whether base and adapter are the same. DoRA, rows and wholes count as changes."""
    return not adapter.rows and not adapter.wholes and not any(map(is_change, adapter.low_rank))


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
