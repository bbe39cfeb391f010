"""Embeddings and heads of an adapter: rows and whole weights that stand in the base's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.adapters.adapter import Rows, Whole
from plait.adapters.plan import Plan, RowsPlan
from plait.adapters.sites import Site

# The weight `[V, H]` of an embedding or head; None where it cannot be had.
BaseWeight = Callable[[Site], Tensor | None]


@dataclass(frozen=True, slots=True)
class Tables:
    """What replaces the base's, with the sizes of the changes where the base is known."""

    rows: tuple[Rows, ...]
    wholes: tuple[Whole, ...]
    norms: Mapping[str, float]  # by site


def make_tables(
    plan: Plan,
    tensors: Mapping[str, Tensor],
    with_low_rank: set[str],
    base_weight: BaseWeight | None,
) -> Tables:
    """Rows and wholes by the plan, at most one of both for each site.

    With `base_weight`, what is as in the base is dropped, and a whole of which few rows differ
    becomes rows, unless a low-rank change (sites in `with_low_rank`) belongs to the whole.
    """
    wholes = {
        each.site.name: Whole(
            site=each.site,
            weight=tensors[each.weight],
            bias=tensors[each.bias] if each.bias else None,
        )
        for each in plan.wholes
    }
    rows = {made.site.name: made for each in plan.rows for made in _rows(each, tensors)}
    for name in wholes.keys() & rows.keys():
        wholes[name] = _with_rows(wholes[name], rows.pop(name))
    found: list[Rows | Whole] = []
    norms: dict[str, float] = {}
    parts: list[Rows | Whole] = [*rows.values(), *wholes.values()]
    for part in parts:
        base = base_weight(part.site) if base_weight else None
        kept = part if base is None else _reduce(part, base, part.site.name in with_low_rank)
        if kept is not None:
            found.append(kept)
            norms[kept.site.name] = _norm(kept, base)
    return Tables(
        rows=tuple(p for p in found if isinstance(p, Rows)),
        wholes=tuple(p for p in found if isinstance(p, Whole)),
        norms=norms,
    )


def _rows(plan: RowsPlan, tensors: Mapping[str, Tensor]) -> Iterator[Rows]:
    ids, order = torch.tensor(plan.token_ids, dtype=torch.int64).sort()
    rows = tensors[plan.rows][order]
    for site in plan.sites:
        yield Rows(site=site, token_ids=ids, rows=rows)


def _with_rows(whole: Whole, rows: Rows) -> Whole:
    dtype = torch.promote_types(whole.weight.dtype, rows.rows.dtype)
    weight = whole.weight.to(dtype, copy=True)
    weight[rows.token_ids] = rows.rows.to(dtype)
    return replace(whole, weight=weight)


def _reduce(part: Rows | Whole, base: Tensor, has_low_rank: bool) -> Rows | Whole | None:
    """The same change, as little of it as there is; compared as the base would store it."""
    if isinstance(part, Rows):
        kept = _differing(part.token_ids, part.rows, base)
        if len(kept) == 0:
            return None
        if len(kept) == len(part.token_ids):
            return part
        return replace(part, token_ids=part.token_ids[kept], rows=part.rows[kept])
    if part.bias is not None:
        return part
    ids = _differing(torch.arange(part.weight.shape[0]), part.weight, base)
    if len(ids) == 0:
        return None
    if has_low_rank or len(ids) > base.shape[0] // 2:
        return part
    return Rows(site=part.site, token_ids=ids, rows=part.weight[ids])


def _differing(ids: Tensor, rows: Tensor, base: Tensor) -> Tensor:
    """Positions in `ids` whose rows the base has not, or has otherwise."""
    inside = ids < base.shape[0]
    differs = torch.ones(len(ids), dtype=torch.bool)
    differs[inside] = (rows[inside].to(base.dtype) != base[ids[inside]]).any(1)
    return differs.nonzero().flatten()


def _norm(part: Rows | Whole, base: Tensor | None) -> float:
    """Size of the change; of what stands there, as far as the base is not known."""
    if isinstance(part, Rows):
        ids, rows = part.token_ids, part.rows.float()
    else:
        ids, rows = torch.arange(part.weight.shape[0]), part.weight.float()
    if base is not None:
        inside = ids < base.shape[0]
        rows = rows.clone()
        rows[inside] -= base[ids[inside]].float()
    return float(rows.norm())
