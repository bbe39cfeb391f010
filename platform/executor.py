"""The contract between the engine and whatever computes a step.

An executor owns the weights and the KV page tensors. It knows nothing of requests: rows come
in as a `StepBatch`, hidden rows go out, and logits are made only for the rows asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch

    from plait.adapters.adapter import Adapter
    from plait.adapters.sites import ModelSites, Site
    from plait.platform.batch import StepBatch
    from plait.platform.config import CacheConfig, KVGroup, ModelInfo
    from plait.platform.core import AdapterUse, ImageItem


class Head(Protocol):
    """The part of an executor that sampling uses."""

    def logits(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """See `Executor`."""

    def likeliest(self, hidden: torch.Tensor, rows: np.ndarray, num_tokens: int) -> list[int]:
        """See `Executor`."""


class Executor(Protocol):
    """Computes steps. `allocate` is called once, before the first `forward`."""

    model: ModelInfo
    kv_groups: tuple[KVGroup, ...]  # with num_blocks = 0: sizes are decided by the budget
    kv_dtype: str
    sites: ModelSites  # where adapters can change the model
    hidden_size: int  # D of hidden rows

    def allocate(self, cache: CacheConfig) -> None:
        """Create the KV page tensors."""

    def encode(
        self, items: Sequence[ImageItem], adapters: Sequence[Sequence[AdapterUse]] = ()
    ) -> list[torch.Tensor]:
        """Embeddings `[num_embeds, levels * D]` of each image, levels side by side.

        `adapters`: those of each image's request; empty where nobody has any. One whose
        `active_from` lies behind the image's start does not change it. Images that fit together
        share runs of the tower; an image's bits do not depend on that.

        Raises `InternalError` that names the image where its tensors do not fit the model.
        """

    def forward(self, batch: StepBatch, embeds: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden rows `[T, D]`, after the final norm; writes K and V of every row.

        Every generation that `batch` names has been placed. `embeds` `[I, levels * D]` belong to
        `batch.image_rows`, which ascend; None where there are none.
        """

    def forward_tapped(
        self, batch: StepBatch, taps: tuple[int, ...], embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and beside its rows what stood between the layers: `[T, len(taps) * D]`.

        Tap i is the row after the first i layers: 0 is the embedding's output, and that of all
        layers is the row before the final norm.
        """

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows `[n, D]` of the base's embedding table, as they are stored, for its own tokens."""

    def logits(self, hidden: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Logits `[R, V]` fp32 for `rows` (int64 indices into hidden), soft cap applied.

        Belongs to the last `forward`: rows have the adapters that they had there. V is the widest
        vocabulary among the rows; a row whose own is smaller has -inf beyond it.
        """

    def likeliest(self, hidden: torch.Tensor, rows: np.ndarray, num_tokens: int) -> list[int]:
        """The first of the largest of the first `num_tokens` of each row's `logits`.

        -1 where one of these is NaN or the largest is not finite.
        """

    def base_weight(self, site: Site) -> torch.Tensor | None:
        """The base's weight `[V, H]` of an embedding or head, a copy; None for other sites.

        May run beside a step, on another thread.
        """

    def keep_adapters_as(self, dtype: torch.dtype) -> None:
        """Keep adapters' low-rank weights as int8, or the model's dtype; before any are placed."""

    def adapter_bytes(self, adapter: Adapter) -> int:
        """Bytes that `place_adapter` will take; exact."""

    def place_adapter(self, adapter: Adapter) -> None:
        """Make a generation ready for steps. May run beside a step, on another thread.

        Raises `PlaitError` where the model cannot compute it. Placing one twice is no error.
        """

    def remove_adapter(self, generation: str) -> None:
        """Free a placed generation; between steps, when no later step will name it."""
