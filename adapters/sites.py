"""The places of a model that an adapter can change, as data. Made by the executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class SiteKind(StrEnum):
    """What stands at a site."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    EXPERTS = "experts"  # one projection of all experts of a layer


class SitePart(StrEnum):
    """The part of the model that a site belongs to."""

    LANGUAGE = "language"
    PROJECTOR = "projector"
    TOWER = "tower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place, by the name that transformers gives its module (or, for experts, parameter)."""

    name: str  # "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up_proj"
    kind: SiteKind
    in_features: int  # of an embedding: the vocabulary
    out_features: int
    layer: int | None = None  # of the decoder
    part: SitePart = SitePart.LANGUAGE
    affects_kv: bool = True  # whether a change here can change a cached K or V
    num_experts: int = 0
    is_transposed: bool = False  # the base stores [in, out] ([experts, in, out])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSites:
    """All sites of one model, and what reading an adapter for it needs to know beside them."""

    sites: Mapping[str, Site]
    is_tied: bool  # head and embedding are one weight
    vocab_size: int  # width of the logits, without what adapters add
    model_name: str  # the served base, for messages
