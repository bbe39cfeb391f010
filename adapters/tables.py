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

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Tables:
    """What replaces the base's, with the sizes of the changes where the base is known."""

    rows: tuple[Rows, ...]
    wholes: tuple[Whole, ...]
    norms: Mapping[str, float]  # by site


def make_tables(
    plan: Plan, tensors: Mapping[str, Tensor], base_weight: BaseWeight | None
) -> Tables:
    """Rows and wholes by the plan, at most one of both for each site.

    With `base_weight`, what is as in the base is dropped, and a whole of which at most half differs
    becomes rows.
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
    parts: list[Rows | Whole] = [*rows.values(), *wholes.values()]
    found: list[Rows | Whole] = []
    norms: dict[str, float] = {}
    for part in parts:
        base = None if base_weight is None else base_weight(part.site)
        kept = part if base is None else _reduce(part, base)
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


def _reduce(part: Rows | Whole, base: Tensor) -> Rows | Whole | None:
    """The same change, as little of it as there is; compared as the base would store it."""
    if isinstance(part, Whole) and part.bias is not None:
        return part
    ids, rows = _ids_and_rows(part)
    differs = torch.ones(len(ids), dtype=torch.bool)
    for where in _pieces(ids, base):
        known = base[ids[where]]
        differs[where] = (rows[where].to(base.dtype) != known).any(1)
    if not bool(differs.any()):
        return None
    is_sparse = int(differs.sum()) <= len(ids) // 2
    if isinstance(part, Whole) and not is_sparse:
        return part
    return Rows(site=part.site, token_ids=ids[differs], rows=rows[differs])


def _norm(part: Rows | Whole, base: Tensor | None) -> float:
    """Size of the change; of what stands there, as far as the base is not known."""
    ids, rows = _ids_and_rows(part)
    squares = rows.float().square().sum(1)
    if base is not None:
        for where in _pieces(ids, base):
            squares[where] = (rows[where].float() - base[ids[where]].float()).square().sum(1)
    return float(squares.sum().sqrt())


def _ids_and_rows(part: Rows | Whole) -> tuple[Tensor, Tensor]:
    if isinstance(part, Rows):
        return part.token_ids, part.rows
    return torch.arange(part.weight.shape[0]), part.weight


def _pieces(ids: Tensor, base: Tensor) -> Iterator[Tensor]:
    """Positions of those ids that the base has, some at a time."""
    known = (ids < base.shape[0]).nonzero().flatten()
    for at in range(0, len(known), _ROWS_AT_ONCE):
        yield known[at : at + _ROWS_AT_ONCE]
