"""What an adapter puts in the place of rows of the embedding or the head.

A whole saved weight is rows too: those that are not bit-equal to the base's in the model's dtype.
PEFT saves a whole table next to changes of a few of its rows, or of none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.adapters.adapter import Adapter, Rows, Whole
from plait.adapters.sites import SiteKind
from plait.platform.errors import InvalidAdapter
from plait.platform.model.adapter_step import EmbeddingRows, HeadRows
from plait.platform.model.leaves import Packed, PackedTable
from plait.platform.model.places import Place
from plait.platform.ops.linear import pack_linear
from plait.platform.ops.packed_rows import packed_rows

_ROWS_AT_ONCE = 4096  # of a base weight that is unpacked for a look


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Rows of one table that stand in the base's place, or that it lacks."""

    token_ids: Tensor  # int64 [n], ascending
    rows: Tensor  # [n, H], of the model's dtype
    bias: Tensor | None = None  # fp32 [n]

    def of_embedding(self, module: nn.Module) -> EmbeddingRows:
        """As the embedding's step reads it."""
        rows = self.rows * embedding_scale(module, self.rows.dtype)
        return EmbeddingRows(token_ids=self.token_ids, rows=rows)

    def of_head(self) -> HeadRows:
        """As the head's step reads it; costs nothing where the rows have no memory."""
        packed = pack_linear(self.rows)
        return HeadRows(token_ids=self.token_ids, packed=packed, bias=self.bias)

    @property
    def head_bytes(self) -> int:
        """Of `of_head`."""
        meta = Table(token_ids=self.token_ids, rows=self.rows.to("meta"), bias=self.bias)
        return meta.of_head().num_bytes

    @property
    def embedding_bytes(self) -> int:
        """Of `of_embedding`."""
        return EmbeddingRows(token_ids=self.token_ids, rows=self.rows).num_bytes


def changed_tables(
    adapter: Adapter, places: Mapping[str, Place], dtype: torch.dtype
) -> dict[SiteKind, Table]:
    """What the adapter replaces in the embedding and in the head, where it differs at all."""
    tables: dict[SiteKind, Table] = {}
    everything: tuple[Rows | Whole, ...] = (*adapter.wholes, *adapter.rows)
    for given in everything:
        place = places[given.site.name]
        kind = place.site.kind
        if kind not in (SiteKind.EMBEDDING, SiteKind.HEAD) or kind in tables:
            raise InvalidAdapter(
                f"{given.site.name} cannot be replaced: an adapter can replace rows of the "
                "embedding and of the head, each once"
            )
        table = _table_of(given, place)
        differs = _differs(table, place, dtype)
        tables[kind] = Table(
            token_ids=table.token_ids[differs],
            rows=table.rows[differs].to(dtype),
            bias=None if table.bias is None else table.bias[differs].float(),
        )
    return {kind: table for kind, table in tables.items() if len(table.token_ids)}


def _table_of(given: Rows | Whole, place: Place) -> Table:
    if isinstance(given, Rows):
        table = Table(token_ids=given.token_ids, rows=given.rows)
    else:
        ids = torch.arange(len(given.weight))
        table = Table(token_ids=ids, rows=given.weight, bias=given.bias)
    size = row_size(place)
    if table.rows.shape != (len(table.token_ids), size):
        raise InvalidAdapter(
            f"{place.site.name}: rows of shape {list(table.rows.shape)} where {size} values for "
            f"each of {len(table.token_ids)} tokens are needed"
        )
    return table


def _differs(table: Table, place: Place, dtype: torch.dtype) -> Tensor:
    """Which rows of the table are not the base's, bool [n]."""
    differs = _bias_differs(table, place)
    for at in range(0, len(table.token_ids), _ROWS_AT_ONCE):
        ids = table.token_ids[at : at + _ROWS_AT_ONCE]
        known = ids < num_rows(place)
        rows = table.rows[at : at + _ROWS_AT_ONCE][known].to(dtype)
        different = ~known
        different[known] = (rows != base_rows(place, ids[known])).any(dim=1)
        differs[at : at + _ROWS_AT_ONCE] |= different
    return differs


def _bias_differs(table: Table, place: Place) -> Tensor:
    base = place.module.bias if place.site.kind is SiteKind.HEAD else None
    if base is None:
        if table.bias is not None:
            raise InvalidAdapter(f"{place.site.name} has no bias, but the adapter brings one")
        return torch.zeros(len(table.token_ids), dtype=torch.bool)
    if table.bias is None:
        raise InvalidAdapter(
            f"{place.site.name} has a bias, and the rows that replace its weight come without one"
        )
    padded = nn.functional.pad(base.float(), (0, max(0, len(table.bias) - len(base))))
    return table.bias.float() != padded[table.token_ids]


def row_size(place: Place) -> int:
    """Values of one row of a table."""
    site = place.site
    return site.in_features if site.kind is SiteKind.HEAD else site.out_features


def num_rows(place: Place) -> int:
    """Rows of a table."""
    site = place.site
    return site.out_features if site.kind is SiteKind.HEAD else site.in_features


def base_rows(place: Place, token_ids: Tensor) -> Tensor:
    """The base's rows of a table `[n, H]`, unscaled."""
    if place.site.kind is SiteKind.HEAD:
        return packed_rows(place.module.packed, token_ids, place.module.weight.dtype)
    weight = place.module.weight
    if isinstance(weight, PackedTable):
        return weight.rows(token_ids)
    return nn.functional.embedding(token_ids, weight)


def looked_up(place: Place) -> Packed | Tensor | None:
    """The table of an embedding whose module does nothing but look rows up; None of others."""
    module = place.module
    is_plain = type(module) is nn.Embedding and module.max_norm is None
    if not is_plain and not getattr(module, "only_looks_up", False):
        return None
    weight: Tensor = module.weight
    return weight.owner.packed if isinstance(weight, PackedTable) else weight.detach()


def embedding_scale(module: Any, dtype: torch.dtype) -> float:
    """By what the family's embedding multiplies its rows, as PEFT finds it."""
    scale = getattr(module, "embed_scale", 1.0)
    return float(torch.as_tensor(scale).to(dtype))
