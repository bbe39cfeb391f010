"""Embeddings and heads of an adapter: rows and whole weights that stand in the base's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.adapters.adapter import Rows, Whole
from plait.adapters.plan import Plan, RowsPlan, table_size
from plait.adapters.sites import Site

# The base's rows `[n, H]` of an embedding or head, for ids that it has.
BaseRows = Callable[[Site, Tensor], Tensor]

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Tables:
    """What replaces the base's, with the sizes of the changes where the base is known."""

    rows: tuple[Rows, ...]
    wholes: tuple[Whole, ...]
    norms: Mapping[str, float]  # by site


def make_tables(plan: Plan, tensors: Mapping[str, Tensor], base_rows: BaseRows | None) -> Tables:
    """Rows and wholes by the plan, at most one of both for each site.

    With `base_rows`, what is as in the base is dropped, and a whole of which at most half differs
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
    found = [kept for part in parts if (kept := _reduce(part, base_rows)) is not None]
    return Tables(
        rows=tuple(p for p in found if isinstance(p, Rows)),
        wholes=tuple(p for p in found if isinstance(p, Whole)),
        norms={part.site.name: _norm(part, base_rows) for part in found},
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


def _reduce(part: Rows | Whole, base_rows: BaseRows | None) -> Rows | Whole | None:
    """The same change, as little of it as there is; compared as the base would store it."""
    if base_rows is None or (isinstance(part, Whole) and part.bias is not None):
        return part
    ids, rows = _ids_and_rows(part)
    differs = torch.ones(len(ids), dtype=torch.bool)
    for where, base in _pieces(part.site, ids, base_rows):
        differs[where] = (rows[where].to(base.dtype) != base).any(1)
    if not bool(differs.any()):
        return None
    is_sparse = int(differs.sum()) <= len(ids) // 2
    if isinstance(part, Whole) and not is_sparse:
        return part
    return Rows(site=part.site, token_ids=ids[differs], rows=rows[differs])


def _norm(part: Rows | Whole, base_rows: BaseRows | None) -> float:
    """Size of the change; of what stands there, as far as the base is not known."""
    ids, rows = _ids_and_rows(part)
    squares = rows.float().square().sum(1)
    if base_rows is not None:
        for where, base in _pieces(part.site, ids, base_rows):
            squares[where] = (rows[where].float() - base.float()).square().sum(1)
    return float(squares.sum().sqrt())


def _ids_and_rows(part: Rows | Whole) -> tuple[Tensor, Tensor]:
    if isinstance(part, Rows):
        return part.token_ids, part.rows
    return torch.arange(part.weight.shape[0]), part.weight


def _pieces(site: Site, ids: Tensor, base_rows: BaseRows) -> Iterator[tuple[Tensor, Tensor]]:
    """The base's rows of those ids that it has, with their positions, some at a time."""
    num_rows, _ = table_size(site)
    known = (ids < num_rows).nonzero().flatten()
    for at in range(0, len(known), _ROWS_AT_ONCE):
        where = known[at : at + _ROWS_AT_ONCE]
        yield where, base_rows(site, ids[where])
