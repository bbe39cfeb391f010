"""What to make of an adapter's tensors, as data. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from plait.adapters.names import Target
from plait.adapters.sites import Site, SiteKind


class Layout(Enum):
    """How the two tensors of a low-rank change lie in the file."""

    PLAIN = "a [r, in], b [out, r]"
    SWAPPED = "a [r, out], b [in, r]: of a parameter that the base stores as [in, out]"
    EXPERTS = "a [E·r, in], expert slowest; b [out, r·E], expert fastest"
    EXPERTS_SWAPPED = "the same with in and out exchanged, as PEFT before 0.19 wrote it"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPlan:
    """One pair of tensors."""

    target: Target
    layout: Layout
    rank: int
    scale: float
    a: str
    b: str
    b_bias: str | None = None
    magnitude: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPlan:
    """One tensor of rows that replace those of an embedding or head."""

    sites: tuple[Site, ...]  # the head follows a tied embedding
    token_ids: tuple[int, ...]
    rows: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePlan:
    """A tensor that replaces the weight of an embedding or head."""

    site: Site
    weight: str
    bias: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to make of a file."""

    low_rank: tuple[LowRankPlan, ...]
    rows: tuple[RowsPlan, ...]
    wholes: tuple[WholePlan, ...]
    copies: tuple[tuple[str, str], ...]  # names of tensors that have to be equal
    vocab_size: int | None  # width of the logits, where tokens are added
    warnings: tuple[str, ...]


def table_size(site: Site) -> tuple[int, int]:
    """Rows (tokens) of an embedding or head, and their width."""
    if site.kind == SiteKind.EMBEDDING:
        return site.in_features, site.out_features
    return site.out_features, site.in_features
