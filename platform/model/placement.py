"""From a checked adapter to what steps read: packed low-rank parts, and rows of both tables.

Runs on any thread, beside steps: it reads the model's weights, which nobody writes, and gives a
new object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.adapters.adapter import Adapter, LowRank
from plait.adapters.sites import SiteKind
from plait.platform.errors import AdapterPlacementFailed, InvalidAdapter
from plait.platform.model.adapter_step import EmbeddingRows, HeadRows
from plait.platform.model.leaves import Packed
from plait.platform.model.places import Place, Places
from plait.platform.model.tables import Table, base_rows, changed_tables, embedding_scale
from plait.platform.ops.lora import LoraPart, PlacedLora, lora_bytes, pack_lora
from plait.platform.ops.tile_layout import TILE_OUTPUTS

_ROWS_AT_ONCE = 1024  # of a base weight that is unpacked for its norms

Gain = Callable[[Place, LowRank], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedAdapter:
    """One generation, ready for steps."""

    lora: PlacedLora
    embedding: EmbeddingRows | None
    head: HeadRows | None
    vocab_size: int  # width of its rows' logits
    added: Tensor  # int64, tokens above the base's vocabulary that have logits
    num_embedded: int  # tokens that its low-rank change of the embedding knows; 0: none

    @property
    def num_bytes(self) -> int:
        """What it takes in memory."""
        tables = [table.num_bytes for table in (self.embedding, self.head) if table is not None]
        return self.lora.num_bytes + sum(tables)


class Placer:
    """Places adapters on one model, whose weights are there."""

    def __init__(self, places: Places, dtype: torch.dtype, vocab_size: int) -> None:
        self._places = places
        self._dtype = dtype
        self.low_rank_dtype = dtype  # or int8
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def num_bytes(self, adapter: Adapter) -> int:
        """What `place` will take."""
        self._check(adapter)
        total = lora_bytes(self._parts(adapter, _no_gain), self.low_rank_dtype)
        tables = self._tables(adapter)
        if SiteKind.EMBEDDING in tables:
            total += tables[SiteKind.EMBEDDING].embedding_bytes
        if SiteKind.HEAD in tables:
            total += tables[SiteKind.HEAD].head_bytes
        return total

    @torch.inference_mode()
    def place(self, adapter: Adapter) -> PlacedAdapter:
        """Compute and pack everything that the adapter changes.

        Raises `InvalidAdapter` where the model cannot compute it, `AdapterPlacementFailed` where
        memory does not suffice.
        """
        self._check(adapter)
        try:
            return self._place(adapter)
        except (MemoryError, RuntimeError) as error:
            raise AdapterPlacementFailed(
                f"adapter {adapter.generation[:12]} could not be placed: {error}"
            ) from error

    def _place(self, adapter: Adapter) -> PlacedAdapter:
        num_leaves = self._places.num_leaves
        lora = pack_lora(self._parts(adapter, _gain), num_leaves, self.low_rank_dtype)
        tables = self._tables(adapter)
        embedding, head = tables.get(SiteKind.EMBEDDING), tables.get(SiteKind.HEAD)
        known = torch.empty(0, dtype=torch.int64) if head is None else head.token_ids
        added = known[known >= self._vocab_size]
        width = max(self._vocab_size, 1 + int(added[-1]) if len(added) else 0)
        self._check_width(adapter, width)
        embedded = [x.a.shape[1] for x in adapter.low_rank if x.site.kind is SiteKind.EMBEDDING]
        module = self._places.embedding.module
        return PlacedAdapter(
            lora=lora,
            embedding=None if embedding is None else embedding.of_embedding(module),
            head=None if head is None else head.of_head(),
            vocab_size=width,
            added=added,
            num_embedded=min(embedded, default=0),
        )

    def _check(self, adapter: Adapter) -> None:
        replaced = {x.site.name for x in adapter.rows} | {x.site.name for x in adapter.wholes}
        changed = {x.site.name for x in adapter.low_rank}
        for name in sorted(replaced | changed):
            if name not in self._places.by_name:
                raise InvalidAdapter(f"{name} is not a place that adapters of this model change")
        for change in adapter.low_rank:
            name = change.site.name
            _check_shapes(self._places.by_name[name], change)

    def _tables(self, adapter: Adapter) -> dict[SiteKind, Table]:
        tables = changed_tables(adapter, self._places.by_name, self._dtype)
        for change in adapter.low_rank:
            if change.magnitude is not None and change.site.kind in tables:
                raise InvalidAdapter(
                    f"{change.site.name} has a DoRA magnitude and rows that replace the base's, "
                    "which is not served: its norms would be another weight's"
                )
        return tables

    def _check_width(self, adapter: Adapter, width: int) -> None:
        for change in adapter.low_rank:
            if change.site.kind is SiteKind.HEAD and change.b.shape[0] > width:
                raise InvalidAdapter(
                    f"{change.site.name} changes {change.b.shape[0]} tokens, but no rows are there "
                    f"for those from {width} on"
                )

    def _parts(self, adapter: Adapter, gain: Gain) -> dict[int, list[LoraPart]]:
        parts: dict[int, list[LoraPart]] = {}
        for change in adapter.low_rank:
            place = self._places.by_name[change.site.name]
            if change.expert is None:
                parts.setdefault(place.leaf, []).append(self._part(place, change, gain))
            else:
                leaf = place.leaf + change.expert
                parts.setdefault(leaf, []).append(_expert_part(change))
        return parts

    def _part(self, place: Place, change: LowRank, gain: Gain) -> LoraPart:
        scale, bias = change.scale, None
        if place.site.kind is SiteKind.EMBEDDING:
            scale *= embedding_scale(place.module, self._dtype)
        elif change.magnitude is not None and place.module.bias is not None:
            bias = place.module.bias[place.start : place.end]
        return LoraPart(
            a=change.a,
            b=change.b,
            scale=scale,
            start=place.start,
            b_bias=change.b_bias,
            g=None if change.magnitude is None else gain(place, change),
            bias=bias,
        )


def _check_shapes(place: Place, change: LowRank) -> None:
    """Tables may be wider than the base's: by tokens that the adapter adds."""
    site, kind = place.site, place.site.kind
    num_in, num_out = site.in_features, site.out_features
    if kind is SiteKind.EMBEDDING and change.magnitude is None:
        num_in = max(num_in, change.a.shape[-1])
    if kind is SiteKind.HEAD and change.magnitude is None:
        num_out = max(num_out, change.b.shape[0])
    a, b, rank = tuple(change.a.shape), tuple(change.b.shape), change.a.shape[0]
    if (a, b) != ((rank, num_in), (num_out, rank)):
        raise InvalidAdapter(
            f"{site.name} takes A [{rank}, {num_in}] and B [{num_out}, {rank}], "
            f"not {list(a)} and {list(b)}"
        )
    is_expert = kind is SiteKind.EXPERTS
    if change.expert not in (range(site.num_experts) if is_expert else (None,)):
        raise InvalidAdapter(f"{site.name}: {change.expert} is none of {site.num_experts} experts")
    if is_expert and (change.magnitude is not None or change.b_bias is not None):
        raise InvalidAdapter(f"{site.name}: experts with a DoRA magnitude or a bias are not served")


def _expert_part(change: LowRank) -> LoraPart:
    """An expert's part, without outputs that it leaves alone: gate and up may come one by one."""
    used = change.b.any(dim=1).nonzero()
    if not len(used):
        return LoraPart(a=change.a, b=change.b[:1], scale=change.scale)
    start, end = int(used[0]), int(used[-1]) + 1
    return LoraPart(a=change.a, b=change.b[start:end], scale=change.scale, start=start)


def _no_gain(place: Place, change: LowRank) -> Tensor:  # noqa: ARG001 - as `_gain`
    """Stands for `_gain` where sizes alone count."""
    return torch.empty(place.site.out_features, device="meta")


def _gain(place: Place, change: LowRank) -> Tensor:
    """DoRA's g: magnitude / ‖W + scale · b a‖ by outputs, fp32."""
    assert change.magnitude is not None
    a, b = change.a.float(), change.b.float() * change.scale
    squares = torch.zeros(place.site.out_features)
    if place.site.kind is SiteKind.EMBEDDING:  # an output is a column of the table
        for at in range(0, place.site.in_features, _ROWS_AT_ONCE):
            ids = torch.arange(at, min(at + _ROWS_AT_ONCE, place.site.in_features))
            rows = base_rows(place, ids).float() + (b @ a[:, ids]).T
            squares += rows.square().sum(dim=0)
    else:
        for at in range(0, place.site.out_features, _ROWS_AT_ONCE):
            end = min(at + _ROWS_AT_ONCE, place.site.out_features)
            rows = _outputs(place.module.packed, place.start + at, place.start + end)
            squares[at:end] = (rows + b[at:end] @ a).square().sum(dim=1)
    g = change.magnitude.float().flatten() / squares.sqrt()
    if not g.isfinite().all():
        raise InvalidAdapter(f"{place.site.name}: a DoRA norm is zero or not finite")
    return g


def _outputs(packed: Packed, start: int, end: int) -> Tensor:
    """Rows `start:end` of the weight that was packed, fp32."""
    border = start // TILE_OUTPUTS * TILE_OUTPUTS
    return packed.slice_outputs(border, end).unpack()[start - border :].float()
