"""The native executor: a decoder as a layer program, with all else as the torch executor has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from plait.adapters.adapter import Adapter
from plait.adapters.sites import Site
from plait.platform.batch import StepBatch
from plait.platform.config import CacheConfig, ModelInfo
from plait.platform.core import AdapterUse, ImageItem
from plait.platform.model.executor import TorchExecutor
from plait.platform.model.inferring import inferring
from plait.platform.model.leaves import Packed
from plait.platform.model.native.lowered import Lowered

if TYPE_CHECKING:
    from plait.platform.model.native.proof import Agreement
    from plait.platform.model.native.runner import PhaseCount
    from plait.platform.model.native.step import StepInputs
    from plait.platform.model.vision import ImageEncoder


class ProgramRunner(Protocol):
    """What runs a program: `Runner`, or the reference."""

    takes_tokens: bool  # in the place of rows, as token ids `[T]`

    def embed(self, table: Packed | Tensor) -> None:
        """Take tokens from now on, whose rows a table `[V, D]` has, if it can."""

    def run(self, rows: Tensor, step: StepInputs) -> Tensor:
        """Hidden rows `[T, D]` for embedded `rows` `[T, D]`."""

    def run_tapped(
        self, rows: Tensor, step: StepInputs, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """`run`, and beside its rows those after so many layers, `[T, len(taps) * D]`."""


class NativeExecutor:
    """Computes steps by a program. Implements `executor.Executor`.

    Embedding, images, head and adapters are the torch executor's, whose leaves share their weights
    with the program.
    """

    def __init__(
        self, torch_executor: TorchExecutor, lowered: Lowered, runner: ProgramRunner
    ) -> None:
        self._torch = torch_executor
        self.lowered = lowered
        self.runner = runner
        self.model: ModelInfo = replace(torch_executor.model, executor="native")
        self.kv_groups = torch_executor.kv_groups
        self.kv_dtype = torch_executor.kv_dtype
        self.sites = torch_executor.sites
        self.hidden_size = torch_executor.hidden_size
        self.leaves = torch_executor.leaves
        self.agreement: Agreement | None = None  # with the torch executor, once it was proved
        table = torch_executor.lookup_table
        if lowered.prologue is None and table is not None:
            runner.embed(table)

    def allocate(self, cache: CacheConfig) -> None:
        """Create the page tensors of every group."""
        self._torch.allocate(cache)

    def forward(self, batch: StepBatch, embeds: Tensor | None = None) -> Tensor:
        """Hidden rows `[T, D]` after the final norm; K and V of every row are written."""
        with inferring():
            rows, step = self._begin(batch, embeds)
            return self.runner.run(rows, step)

    def forward_tapped(
        self, batch: StepBatch, taps: tuple[int, ...], embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`forward`, and beside its rows those after so many layers, `[T, len(taps) * D]`."""
        with inferring():
            rows, step = self._begin(batch, embeds)
            return self.runner.run_tapped(rows, step, taps)

    def _begin(self, batch: StepBatch, embeds: Tensor | None) -> tuple[Tensor, StepInputs]:
        if self.lowered.tables:
            last = max(batch.positions.ravel().tolist(), default=-1)
            self.lowered.reach(self._torch.first_position + last + 1)
        rows, step = self._torch.embedded(batch, embeds, tokens_will_do=self.runner.takes_tokens)
        return self.lowered.begin(rows, step.positions), step

    def encode(
        self, items: Sequence[ImageItem], adapters: Sequence[Sequence[AdapterUse]] = ()
    ) -> list[Tensor]:
        """Embeddings `[num_embeds, levels * D]` of each image."""
        return self._torch.encode(items, adapters)

    def open_vision(self) -> ImageEncoder:
        """Have tower and projector ready, which not every start loads. Between steps only."""
        return self._torch.open_vision()

    @property
    def is_vision_stored(self) -> bool:
        """Whether opening them takes no time."""
        return self._torch.is_vision_stored

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows `[n, D]` of the base's embedding table, as they are stored."""
        return self._torch.embed(token_ids)

    def logits(self, hidden: Tensor, rows: np.ndarray) -> Tensor:
        """Logits `[R, V]` in fp32 for `rows`, as the family's own head computes them."""
        return self._torch.logits(hidden, rows)

    def likeliest(self, hidden: Tensor, rows: np.ndarray, num_tokens: int) -> list[int]:
        """The likeliest of the first `num_tokens` tokens of `rows`; -1: not finite."""
        return self._torch.likeliest(hidden, rows, num_tokens)

    @property
    def head_bytes(self) -> int:
        """Bytes of weights that `logits` reads; 0: not known."""
        return self._torch.head_bytes

    def phase_counts(self) -> list[PhaseCount]:
        """What the program's instructions took so far; nothing where its runner does not count."""
        counters = getattr(self.runner, "counters", None)
        return [] if counters is None else counters()

    def base_weight(self, site: Site) -> Tensor | None:
        """The base's weight `[V, H]` of an embedding or head, a copy; None for other sites."""
        return self._torch.base_weight(site)

    def keep_adapters_as(self, dtype: torch.dtype) -> None:
        """Keep low-rank weights of adapters in another dtype than the model's; before any are."""
        self._torch.keep_adapters_as(dtype)

    def adapter_bytes(self, adapter: Adapter) -> int:
        """Bytes that `place_adapter` will take; exact."""
        return self._torch.adapter_bytes(adapter)

    @property
    def pages(self) -> list[Tensor]:
        """The page tensors of every group, empty before `allocate`."""
        return self._torch.pages

    @property
    def placed_bytes(self) -> int:
        """Bytes of all placed adapters."""
        return self._torch.placed_bytes

    def place_adapter(self, adapter: Adapter) -> None:
        """Make a generation ready for steps; may run beside one, on another thread."""
        self._torch.place_adapter(adapter)

    def remove_adapter(self, generation: str) -> None:
        """Free a placed generation, between steps."""
        self._torch.remove_adapter(generation)
