"""The executor's side of adapters: which are placed, and what each step's rows have of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.adapters.adapter import Adapter
from plait.adapters.sites import Site, SiteKind, SitePart
from plait.platform.batch import AdapterSegment, StepBatch
from plait.platform.errors import InternalError
from plait.platform.model.adapter_step import EmbeddingStep, ExpertsStep, HeadStep, LayerStep
from plait.platform.model.leaves import Linear, Packed
from plait.platform.model.parts import Head
from plait.platform.model.placement import PlacedAdapter, Placer
from plait.platform.model.places import Places
from plait.platform.model.tables import base_rows, looked_up, num_rows
from plait.platform.model.tower import TowerStep
from plait.platform.ops.likeliest import likeliest, linear_likeliest
from plait.platform.ops.lora import LoraSegments, PlacedLora

_Segment = tuple[int, int, PlacedAdapter, float]


class ModelAdapters:
    """Placed adapters of one model, and its steps.

    `place` may run on another thread: what it shares with a step is one assignment to `_placed`.
    """

    def __init__(self, places: Places, dtype: torch.dtype, vocab_size: int) -> None:
        self._places = places
        self._placer = Placer(places, dtype, vocab_size)
        self._placed: dict[str, PlacedAdapter] = {}
        self._vocab_size = vocab_size
        self._segments: tuple[_Segment, ...] = ()  # of the last step
        self._layers = LayerStep()
        self._head = HeadStep()
        self._embedding = EmbeddingStep(places.embedding.leaf)
        self.tower = TowerStep()
        self._tower_leaves = 0  # as bits
        self._attach(places)

    def _attach(self, places: Places) -> None:
        """Give every leaf its step."""
        places.embedding.module.register_forward_hook(self._embedding)
        experts: dict[Any, list[int]] = {}
        for place in places.by_name.values():
            if place.site.kind is SiteKind.EXPERTS:
                experts.setdefault(place.module, []).append(place.leaf)
            elif place.site.part is not SitePart.LANGUAGE:
                place.module.adapters = self.tower
                place.module.number = place.leaf
                self._tower_leaves |= 1 << place.leaf
            elif place.site.kind is not SiteKind.EMBEDDING:
                is_head = place.site.kind is SiteKind.HEAD
                place.module.adapters = self._head if is_head else self._layers
                place.module.number = place.leaf
        for module, (up, down) in experts.items():
            step = ExpertsStep(self._layers, up, down, num_experts=down - up)
            module.__dict__["adapters"] = step

    @torch.inference_mode()
    def base_weight(self, site: Site) -> Tensor | None:
        """The base's weight `[V, H]` of an embedding or head, a copy; None for other sites."""
        if site.kind not in (SiteKind.EMBEDDING, SiteKind.HEAD):
            return None
        place = self._places.by_name[site.name]
        return base_rows(place, torch.arange(num_rows(place)))

    def embedding_rows(self, token_ids: Tensor) -> Tensor:
        """The base's rows of the embedding, unscaled."""
        return base_rows(self._places.embedding, token_ids)

    def keep_as(self, dtype: torch.dtype) -> None:
        """Keep low-rank weights of adapters that are placed later in another dtype than ours."""
        self._placer.low_rank_dtype = dtype

    def num_bytes(self, adapter: Adapter) -> int:
        """Bytes that `place` will take; exact."""
        return self._placer.num_bytes(adapter)

    @property
    def segments(self) -> LoraSegments | None:
        """The low-rank changes of the last step's rows in the decoder; None: there are none."""
        return self._layers.segments

    @property
    def placed_bytes(self) -> int:
        """Bytes of all that are placed."""
        return sum(placed.num_bytes for placed in self._placed.values())

    def place(self, adapter: Adapter) -> None:
        """Make a generation ready for steps; placing one twice is no error."""
        if adapter.generation not in self._placed:
            self._placed[adapter.generation] = self._placer.place(adapter)

    def remove(self, generation: str) -> None:
        """Free a generation, and the last step that may still hold it."""
        self._placed.pop(generation, None)
        self._set_segments(())

    def tower_changes(self, generation: str) -> PlacedLora | None:
        """What a placed generation changes, if anything of it is in the tower or projector."""
        placed = self._placed.get(generation)
        if placed is None:
            raise InternalError(f"adapter {generation[:12]} was not placed")
        return placed.lora if placed.lora.changed & self._tower_leaves else None

    def begin(self, batch: StepBatch) -> Tensor:
        """Point the layers' and the embedding's steps at `batch`; returns its token ids.

        Ids of tokens that adapters add are replaced by 0 there: the base has no row for them.
        """
        token_ids = torch.from_numpy(batch.token_ids)
        if batch.adapter_segments or self._segments:
            self._set_segments(tuple(self._resolve(s) for s in batch.adapter_segments))
            self._layers.num_rows = len(token_ids)
            self._embedding.token_ids = token_ids
        if max(batch.token_ids.tolist(), default=0) < self._vocab_size:
            return token_ids
        is_added = token_ids >= self._vocab_size
        self._begin_added(token_ids, is_added)
        return token_ids.masked_fill(is_added, 0)

    @property
    def lookup_table(self) -> Packed | Tensor | None:
        """Of an embedding that only looks rows up."""
        return looked_up(self._places.embedding)

    @property
    def has_segments(self) -> bool:
        """Whether adapters change rows of the step."""
        return bool(self._segments)

    def _resolve(self, segment: AdapterSegment) -> _Segment:
        placed = self._placed.get(segment.generation)
        if placed is None:
            raise InternalError(f"adapter {segment.generation[:12]} was not placed")
        if segment.scale != 1.0 and (placed.embedding is not None or placed.head is not None):
            raise InternalError(
                f"adapter {segment.generation[:12]} replaces rows of a table, which have no scale"
            )
        return segment.start, segment.end, placed, segment.scale

    def _set_segments(self, segments: tuple[_Segment, ...]) -> None:
        if segments != self._segments:  # steps of single tokens often have those of the last one
            self._segments = segments
            self._layers.segments = _low_rank(segments)
        self._embedding.segments = self._layers.segments
        self._embedding.replaced = [(a, b, p.embedding) for a, b, p, _ in segments if p.embedding]
        self._head.segments, self._head.replaced = None, ()

    def _begin_added(self, token_ids: Tensor, is_added: Tensor) -> None:
        """Every added token needs an adapter that has it; the others do not change it."""
        has_row = ~is_added
        for start, end, rows in self._embedding.replaced:
            has_row[start:end] |= rows.find(token_ids[start:end])[1]
        if not has_row.all():
            token = int(token_ids[~has_row][0])
            raise InternalError(f"token {token} is in no vocabulary of its row's adapters")
        cut: list[_Segment] = []
        for start, end, placed, scale in self._segments:
            known = (token_ids[start:end] < placed.num_embedded).tolist()
            for at, to in _runs(known):
                cut.append((start + at, start + to, placed, scale))
        self._embedding.segments = _low_rank(cut) or LoraSegments(())

    def logits(self, head: Head, hidden: Tensor, rows: np.ndarray) -> Tensor:
        """Logits of `rows` of the last step."""
        if not self._change_head():
            return head(_picked(hidden, rows))
        order = np.argsort(rows, kind="stable")
        in_order = rows[order]
        borders = np.searchsorted(in_order, [segment[:2] for segment in self._segments])
        picked = [
            (start, end, placed, scale)
            for (start, end), (_, _, placed, scale) in zip(
                borders.tolist(), self._segments, strict=True
            )
            if start < end
        ]
        self._begin_head(picked, len(rows))
        logits = head(_picked(hidden, in_order))
        self._ban(logits, picked)
        back = np.argsort(order, kind="stable")
        return logits if (order == back).all() else logits[torch.from_numpy(back)]

    def likeliest(self, head: Head, hidden: Tensor, rows: np.ndarray, num_tokens: int) -> list[int]:
        """The likeliest of the first `num_tokens` tokens of `rows`; -1: not finite."""
        if self._change_head() or not isinstance(head, Linear) or head.packed is None:
            return likeliest(self.logits(head, hidden, rows), num_tokens)
        return linear_likeliest(_picked(hidden, rows), head.packed, head.bias, num_tokens)

    def _change_head(self) -> bool:
        """Whether an adapter of the step changes logits, or has some that the base has not."""
        place = self._places.head
        bit = 0 if place is None else 1 << place.leaf
        return any(
            placed.head is not None
            or placed.vocab_size != self._vocab_size
            or placed.lora.changed & bit
            for _, _, placed, _ in self._segments
        )

    def _begin_head(self, segments: Sequence[_Segment], num_rows: int) -> None:
        step = self._head
        step.segments = _low_rank(segments)
        step.replaced = [(a, b, placed.head) for a, b, placed, _ in segments if placed.head]
        step.num_rows = num_rows
        step.width = max((p.vocab_size for _, _, p, _ in segments), default=self._vocab_size)

    def _ban(self, logits: Tensor, segments: Sequence[_Segment]) -> None:
        """Put -inf where a row has no token. After the family's head, whose cap would lift it."""
        if logits.shape[1] != self._head.width:
            raise InternalError(f"the head made {logits.shape[1]} of {self._head.width} logits")
        if logits.shape[1] == self._vocab_size:
            return
        has_token = torch.zeros((len(logits), logits.shape[1] - self._vocab_size), dtype=torch.bool)
        for start, end, placed, _ in segments:
            has_token[start:end, placed.added - self._vocab_size] = True
        logits[:, self._vocab_size :].masked_fill_(~has_token, -torch.inf)


def _picked(hidden: Tensor, rows: np.ndarray) -> Tensor:
    """`hidden[rows]`; where all rows are wanted, as they are in a step of single tokens, itself."""
    if len(rows) == len(hidden) and rows.tolist() == list(range(len(rows))):
        return hidden
    return hidden[torch.from_numpy(rows)]


def _low_rank(segments: Sequence[_Segment]) -> LoraSegments | None:
    """None where there is no segment at all."""
    if not segments:
        return None
    return LoraSegments((start, end, placed.lora, scale) for start, end, placed, scale in segments)


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Ranges of flags that are set."""
    at = 0
    for is_set, run in itertools.groupby(flags):
        length = sum(1 for _ in run)
        if is_set:
            yield at, at + length
        at += length
