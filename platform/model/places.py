"""Where the places are that adapters can change: see `sites.py`, which finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.adapters.sites import ModelSites, Site


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """Where a site's outputs are computed: `start:end` of the outputs of leaf number `leaf`.

    For experts the number is the first expert's, the others follow.
    """

    site: Site
    module: Any  # the leaf; of experts, the module whose `attribute` they are
    leaf: int
    start: int
    end: int
    attribute: str = "weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """All places of one model, by site name."""

    by_name: Mapping[str, Place]
    num_leaves: int
    head: Place | None
    embedding: Place
    is_tied: bool

    def sites(self, *, vocab_size: int, model_name: str) -> ModelSites:
        """The same as data."""
        return ModelSites(
            sites={name: place.site for name, place in self.by_name.items()},
            is_tied=self.is_tied,
            vocab_size=vocab_size,
            model_name=model_name,
        )
