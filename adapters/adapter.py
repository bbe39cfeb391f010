"""An adapter in memory, read and checked, in the dtypes of its file. Immutable."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from plait.adapters.info import AdapterInfo
from plait.adapters.sites import Site


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRank:
    """ΔW = scale · b @ a at one site (of one expert there, for experts).

    With `magnitude` (DoRA) the site computes g ⊙ (W x + scale · b a x) + bias, where
    g = magnitude / ‖W + scale · b a‖ by rows; else W x + bias + scale · (b a x + b_bias).
    """

    site: Site
    a: Tensor  # [r, in]
    b: Tensor  # [out, r]
    scale: float  # alpha / r, or alpha / √r; never folded into a or b
    b_bias: Tensor | None = None  # [out], scaled with b's product
    magnitude: Tensor | None = None  # [out]
    expert: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of an embedding or head that stand in the place of the base's.

    Ids at or above the model's vocabulary are tokens that the adapter adds.
    """

    site: Site
    token_ids: Tensor  # int64 [n], ascending, unique
    rows: Tensor  # [n, H]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whole:
    """A whole weight that stands in the place of an embedding's or head's."""

    site: Site
    weight: Tensor  # [V', H]; V' is at least the model's vocabulary
    bias: Tensor | None = None  # of a head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """One generation: everything that it changes."""

    info: AdapterInfo
    low_rank: tuple[LowRank, ...] = ()
    rows: tuple[Rows, ...] = ()
    wholes: tuple[Whole, ...] = ()
    draft: Adapter | None = None  # of the draft model, under the same generation

    @property
    def generation(self) -> str:
        """SHA-256 (hex) of its content."""
        return self.info.generation
