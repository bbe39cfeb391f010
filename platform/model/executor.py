"""The torch executor: runs a family's own modules, with our leaves, over paged KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from plait.adapters.adapter import Adapter
from plait.adapters.sites import Site
from plait.platform.batch import StepBatch
from plait.platform.config import CacheConfig, KVGroup, ModelInfo
from plait.platform.core import AdapterUse, ImageItem
from plait.platform.errors import InternalError
from plait.platform.kv.pages import create_pages
from plait.platform.model.adapters import ModelAdapters
from plait.platform.model.attention import GroupStep, PagedSite, StepContext
from plait.platform.model.embeds import (
    grid_positions,
    put_embeds,
    row_positions,
    without_image_tokens,
)
from plait.platform.model.inferring import inferring
from plait.platform.model.leaves import Packed
from plait.platform.model.native.step import StepInputs
from plait.platform.model.parts import Parts
from plait.platform.model.taps import Taps
from plait.platform.model.vision import ImageEncoder

if TYPE_CHECKING:
    from plait.platform.model.probe import LayerAttention


class TorchExecutor:
    """Computes steps on the CPU. Implements `executor.Executor`."""

    def __init__(
        self, parts: Parts, model: ModelInfo, kv_groups: tuple[KVGroup, ...], kv_dtype: str
    ) -> None:
        self.model = model
        self.kv_groups = kv_groups
        self.kv_dtype = kv_dtype
        self.leaves = parts.leaves
        self._backbone = parts.backbone
        self._head = parts.head
        self.hidden_size = parts.hidden_size
        self._taps = Taps(parts.backbone, parts.layers, self.hidden_size)
        self._adapters = ModelAdapters(parts.places, parts.dtype, model.vocab_size)
        self.sites = parts.places.sites(vocab_size=model.vocab_size, model_name=model.name)
        nothing = torch.empty(0, dtype=torch.int32)
        self._step = StepContext([], nothing, nothing)
        self._output = parts.output
        self._family = parts.family
        self._dtype = parts.dtype
        self._open_vision = parts.open_vision
        self.is_vision_stored = parts.is_vision_stored
        self._encoder: ImageEncoder | None = None
        self._attach(parts.layers)

    def open_vision(self) -> ImageEncoder:
        """Have tower and projector ready, which not every start loads. Between steps only."""
        if self._encoder is None:
            if self._open_vision is None or self.model.vision is None:
                raise InternalError(f"{self.model.architecture} takes no images")
            self._encoder = ImageEncoder(
                self._open_vision(self._adapters.tower),
                self.model.vision,
                self._dtype,
                self._adapters.tower,
                self._adapters.tower_changes,
                self.leaves.release,
            )
        return self._encoder

    def _attach(self, layers: Sequence[LayerAttention]) -> None:
        """Hang a paged site on every attention module."""
        places = {
            layer: (group, index)
            for group, kv_group in enumerate(self.kv_groups)
            for index, layer in enumerate(kv_group.layers)
        }
        for layer in layers:
            group, index = places[layer.layer]
            site = PagedSite(self._step, group, index, self.kv_groups[group].window)
            layer.module.__dict__["attention_site"] = site

    def allocate(self, cache: CacheConfig) -> None:
        """Create the page tensors of every group."""
        nothing = torch.empty(0, dtype=torch.int64)
        self._step.groups[:] = [GroupStep(pages, nothing, nothing) for pages in create_pages(cache)]

    def release(self) -> None:
        """Let go of the pages, and of what is kept of the last step."""
        self._step.groups.clear()
        self.leaves.release()

    @torch.inference_mode()
    def encode(
        self, items: Sequence[ImageItem], adapters: Sequence[Sequence[AdapterUse]] = ()
    ) -> list[Tensor]:
        """Embeddings `[num_embeds, levels * D]` of each image."""
        return self.open_vision().encode(items, adapters)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, embeds: Tensor | None = None) -> Tensor:
        """Hidden rows `[T, D]` after the final norm; K and V of every row are written."""
        self._step.begin(batch)
        output = self._backbone(
            **self._inputs(batch, embeds),
            position_ids=grid_positions(batch, self._family),
            use_cache=False,
        )
        self.leaves.release()
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @property
    def lookup_table(self) -> Packed | Tensor | None:
        """The embedding's table, where it only looks rows up."""
        return self._adapters.lookup_table

    def embedded(
        self, batch: StepBatch, embeds: Tensor | None = None, *, tokens_will_do: bool = False
    ) -> tuple[Tensor, StepInputs]:
        """What a layer program takes in the place of `forward`: embedded rows and their step.

        With `tokens_will_do` the rows may be token ids `[T]`, of which all are the base's.
        """
        step = self._step
        step.begin(batch)
        if embeds is None and not len(batch.image_rows):
            rows = self._adapters.begin(batch)
            if not tokens_will_do or self._adapters.has_segments:
                rows = self._backbone.get_input_embeddings()(rows[None])[0]
        else:
            rows = self._inputs(batch, embeds)["inputs_embeds"][0]
        return rows, StepInputs(
            positions=row_positions(batch, self._family),
            query_start=step.query_start,
            seq_lens=step.seq_lens,
            groups=step.groups,
            ranges=step.ranges,
            lora=self._adapters.segments,
            embeds=None if embeds is None else embeds.to(rows.dtype),
            image_rows=None if embeds is None else torch.from_numpy(batch.image_rows),
        )

    @property
    def pages(self) -> list[Tensor]:
        """The page tensors of every group, empty before `allocate`."""
        return [group.pages for group in self._step.groups]

    @property
    def num_layers(self) -> int:
        """Layers between which rows can be tapped."""
        return self._taps.num_layers

    @property
    def first_position(self) -> int:
        """Where the model takes a sequence to begin."""
        return 0 if self._family is None else self._family.first_position

    @property
    def num_positions(self) -> int:
        """Positions that rows can be at."""
        return self.model.context_length + self.first_position

    def _inputs(self, batch: StepBatch, embeds: Tensor | None) -> dict[str, Any]:
        """Tokens, or what they are embedded as where some of them are images."""
        if embeds is None and not len(batch.image_rows):
            return {"input_ids": self._adapters.begin(batch)[None]}
        if embeds is None or self.model.vision is None:
            raise InternalError(f"{len(batch.image_rows)} rows of images come without embeds")
        token_ids = self._adapters.begin(without_image_tokens(batch))[None]
        embedded = self._backbone.get_input_embeddings()(token_ids)
        return put_embeds(embedded, batch, embeds, self.model.vision)

    @torch.inference_mode()
    def forward_tapped(
        self, batch: StepBatch, taps: tuple[int, ...], embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and beside its rows those after so many layers, `[T, len(taps) * D]`."""
        with self._taps.taken(taps) as rows:
            hidden = self.forward(batch, embeds)
        return hidden, torch.cat(rows(), dim=-1)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows `[n, D]` of the base's embedding table, as they are stored."""
        return self._adapters.embedding_rows(token_ids)

    def logits(self, hidden: Tensor, rows: np.ndarray) -> Tensor:
        """Logits `[R, V]` in fp32 for `rows`, as the family's own head computes them."""
        with inferring():
            return self._adapters.logits(self._head, hidden, rows)

    def likeliest(self, hidden: Tensor, rows: np.ndarray, num_tokens: int) -> list[int]:
        """The likeliest of the first `num_tokens` tokens of `rows`; -1: not finite."""
        with inferring():
            return self._adapters.likeliest(self._head, hidden, rows, num_tokens)

    @property
    def head_bytes(self) -> int:
        """Bytes of weights that `logits` reads; 0: not known."""
        packed = getattr(self._output, "packed", None)
        return 0 if packed is None else int(packed.num_bytes)

    def base_weight(self, site: Site) -> Tensor | None:
        """The base's weight `[V, H]` of an embedding or head, a copy; None for other sites."""
        return self._adapters.base_weight(site)

    def keep_adapters_as(self, dtype: torch.dtype) -> None:
        """Keep low-rank weights of adapters in another dtype than the model's; before any are."""
        self._adapters.keep_as(dtype)

    def adapter_bytes(self, adapter: Adapter) -> int:
        """Bytes that `place_adapter` will take; exact."""
        return self._adapters.num_bytes(adapter)

    @property
    def placed_bytes(self) -> int:
        """Bytes of all placed adapters."""
        return self._adapters.placed_bytes

    def place_adapter(self, adapter: Adapter) -> None:
        """Make a generation ready for steps; may run beside one, on another thread."""
        self._adapters.place(adapter)

    def remove_adapter(self, generation: str) -> None:
        """Free a placed generation, between steps."""
        self._adapters.remove(generation)
