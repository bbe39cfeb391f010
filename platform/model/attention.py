"""How a transformers module reaches our paged attention.

`NAME` is registered with transformers' attention interface, so a module calls
`attention_forward`, which hands over to the `attention_site` that hangs on that module. While a
model is served, the site is a `PagedSite`: it writes K and V of the step's rows into the pages
and attends over them. While a model is probed, it records what the module asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.platform.batch import StepBatch
from plait.platform.errors import InternalError
from plait.platform.ops.kv_write import kv_write
from plait.platform.ops.paged_attention import paged_attention

NAME = "plait"


class AttentionSite(Protocol):
    """What `attention_forward` calls; shapes as transformers passes them, `[1, H, T, D]`."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attention output `[1, T, H, D]`."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Entry point for transformers modules."""
    site: AttentionSite | None = module.__dict__.get("attention_site")
    if site is None:
        raise InternalError(f"{type(module).__name__} attends, but was not seen while probing")
    return site(query, key, value, attention_mask, options), None


def register() -> None:
    """Make `NAME` known to transformers; no mask function, so that no masks are built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)


@dataclass(slots=True)
class GroupStep:
    """One KV group's pages, and where this step's rows lie in them."""

    pages: Tensor  # [num_blocks, L, 2, Hkv, block_size, D]
    slot_mapping: Tensor  # int64 [T]
    block_table: Tensor  # int32 [S, B]


@dataclass(slots=True)
class StepContext:
    """What the attention sites of one executor read during a forward; filled by `begin`."""

    groups: list[GroupStep]
    query_start: Tensor  # int32 [S+1]
    seq_lens: Tensor  # int32 [S]
    ranges: Tensor | None = None  # int32 [N, 3], where tokens see each other both ways

    def begin(self, batch: StepBatch) -> None:
        """Point the sites at `batch`."""
        self.query_start = torch.from_numpy(batch.query_start)
        self.seq_lens = torch.from_numpy(batch.seq_lens)
        self.ranges = torch.from_numpy(batch.ranges) if len(batch.ranges) else None
        for group, slots, table in zip(
            self.groups, batch.slot_mapping, batch.block_tables, strict=True
        ):
            group.slot_mapping = torch.from_numpy(slots)
            group.block_table = torch.from_numpy(table)


class PagedSite:
    """One layer's attention over the pages of its group."""

    def __init__(self, step: StepContext, group: int, layer: int, window: int | None) -> None:
        self.step = step
        self.group = group
        self.layer = layer  # index inside the group
        self.window = window

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Write K and V, then attend; the rows' order and spans are the step's."""
        if mask is not None:
            raise InternalError("a mask reached paged attention")
        step = self.step
        group = step.groups[self.group]
        query_THD, key_THD, value_THD = (x[0].transpose(0, 1) for x in (query, key, value))
        kv_write(group.pages, self.layer, key_THD, value_THD, group.slot_mapping)
        output = paged_attention(
            query_THD,
            group.pages,
            self.layer,
            group.block_table,
            step.query_start,
            step.seq_lens,
            scale=options["scaling"],
            window=self.window,
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
            ranges=step.ranges,
        )
        return output[None, :, :, : value.shape[-1]]
