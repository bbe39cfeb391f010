"""Random adapters for every linear of a model, to measure what adapters cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from plait.adapters.registry import Wish
from plait.adapters.sites import SiteKind
from plait.platform.offline.adapters import LocalAdapters
from plait.platform.offline.running import Running

if TYPE_CHECKING:
    from plait.adapters.info import AdapterInfo
    from plait.adapters.sites import ModelSites
    from plait.platform.start import Started


def load_random_adapters(started: Started, *, count: int, rank: int) -> list[AdapterInfo]:
    """Load `count` different adapters, kept where steps can use them.

    Raises `PlaitError` where they do not fit `--adapter-memory`.
    """
    adapters = LocalAdapters(started.engine, started.tokenizer, Running(started.engine))
    try:
        named = [
            adapters.load(
                Wish(name=f"random-{seed}", pinned=True),
                source=None,
                tensors=_tensors(started.sites, rank, seed),
                config={"peft_type": "LORA", "r": rank, "lora_alpha": rank},
            )
            for seed in range(count)
        ]
    finally:
        adapters.close()  # the copies on disk; the engine keeps what is placed
    return [one.info for one in named]


def _tensors(sites: ModelSites, rank: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, site in sites.sites.items():
        if site.kind is SiteKind.LINEAR:
            for part, shape in (("A", (rank, site.in_features)), ("B", (site.out_features, rank))):
                # Small, so that answers stay like the base's.
                values = torch.randn(shape, generator=generator) * 0.01
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = values.bfloat16()
    return tensors
