"""What an executor needs around a layer program, as plain data, and made from it again.

Without transformers: an embedding that gathers, a head that multiplies, and leaves that hold the
weights of both, and those that adapters change. A family that does more there (scales, caps) is
not stored, which is tried out before.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from plait.adapters.sites import Site, SiteKind, SitePart
from plait.platform.errors import InternalError
from plait.platform.kv.pages import DTYPES
from plait.platform.model import leaves as ours
from plait.platform.model.families import VisionFamily
from plait.platform.model.leaves import Leaves, Linear, PackedTable, Rows
from plait.platform.model.native.stored import NotStorable
from plait.platform.model.packed_file import Kept
from plait.platform.model.parts import Parts
from plait.platform.model.places import Place, Places
from plait.platform.model.stored_tower import StoredTower, describe_tower
from plait.platform.model.tower import TowerStep
from plait.platform.model.vision import VisionParts
from plait.platform.ops.linear import PackedWeight
from plait.platform.ops.quantized_weight import PackedQuantized

log = logging.getLogger(__name__)

_NUM_TRIED = 64  # tokens that a family's embedding is compared by
OpenVision = Callable[[TowerStep], VisionParts]


class KeptNames:
    """What a model keeps, by name. Implements `native.stored.Names`."""

    def __init__(self, values: Iterable[tuple[str, Kept]]) -> None:
        self._values = dict(values)
        self._names = {_identity(value): name for name, value in self._values.items()}

    def of(self, value: Any) -> str | None:
        """The name of a tensor or packed weight; None where it has none."""
        return self._names.get(_identity(value))

    def find(self, name: str) -> Any:
        """What is kept under a name."""
        return self._values[name]


def _identity(value: Any) -> Any:
    """Equal for two that are the same memory read in the same way."""
    if isinstance(value, PackedWeight):
        return _identity(value.tiles), value.out_features, value.in_features
    if isinstance(value, PackedQuantized):
        rest = [getattr(value, f.name) for f in dataclasses.fields(value) if f.name != "blob"]
        return _identity(value.blob), *rest
    if isinstance(value, Tensor) and value.numel():
        return value.data_ptr(), value.dtype, tuple(value.shape), value.stride()
    return id(value)


class Embedding(nn.Module):
    """Rows of a table, as `nn.Embedding` gives them."""

    only_looks_up = True
    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """Rows `[..., D]` of `token_ids`."""
        return functional.embedding(token_ids, self.weight)


class Backbone(nn.Module):
    """Stands for the decoder that a program runs in its place."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def get_input_embeddings(self) -> Embedding:
        """As transformers' models have it."""
        return self.embedding

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises: nobody may ask."""
        raise InternalError("a model that was started from its stored program has no other form")


# --- to data ---


def describe_parts(parts: Parts, names: KeptNames, vision: VisionParts | None = None) -> Any:
    """What JSON can have of the parts. Raises `NotStorable`."""
    _check(parts)
    linears = list(dict.fromkeys([site.leaf for site in parts.leaves.sites.values()]))
    num_sites, tower = len(linears), None
    if vision is not None:
        try:
            tower, linears = describe_tower(vision, linears, names.of, parts.dtype)
        except NotStorable as why:
            log.info("a later start opens the tower in its family's class: %s", why)
    numbers = {leaf: number for number, leaf in enumerate(linears)}
    embedding = parts.places.embedding
    return {
        "dtype": str(parts.dtype).removeprefix("torch."),
        "hidden_size": parts.hidden_size,
        "leaves": [_describe_leaf(leaf, names) for leaf in linears],
        "num_sites": num_sites,  # the tower alone has those behind
        "tower": tower,
        "sites": {
            name: [numbers[site.leaf], site.start, site.end]
            for name, site in parts.leaves.sites.items()
        },
        "transposed": sorted(parts.leaves.transposed),
        "head": numbers[parts.output],
        "embedding": _describe_table(embedding.module.weight, numbers, names),
        "places": [_describe_place(p, numbers, embedding) for p in _all(parts.places)],
        "head_place": None if parts.places.head is None else parts.places.head.site.name,
        "num_leaves": parts.places.num_leaves,
        "is_tied": parts.places.is_tied,
        "family": None if parts.family is None else dataclasses.asdict(parts.family),
    }


def _all(places: Places) -> list[Place]:
    return list(places.by_name.values())


@torch.inference_mode()
def _check(parts: Parts) -> None:
    """Embedding and head must be no more than ours."""
    embedding, leaf = parts.places.embedding.module, parts.output
    if type(leaf) is not Linear or leaf not in {s.leaf for s in parts.leaves.sites.values()}:
        raise NotStorable("a head that is no linear layer")
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.num_embeddings, (1, _NUM_TRIED), generator=random)
    if hasattr(embedding, "embed_scale") or not torch.equal(
        embedding(ids), Embedding(embedding.weight)(ids)
    ):
        raise NotStorable("an embedding that does more than gather")
    if parts.head is not leaf:
        raise NotStorable("a head that does more than multiply")


def _describe_leaf(leaf: Linear, names: KeptNames) -> Any:
    weight = names.of(leaf.packed)
    bias = None if leaf.bias is None else names.of(leaf.bias)
    if weight is None or (bias is None) != (leaf.bias is None):
        raise NotStorable("a linear layer whose weight has no name")
    out = None if leaf.out_dtype is None else str(leaf.out_dtype).removeprefix("torch.")
    return [weight, bias, leaf.in_features, leaf.out_features, out]


def _describe_table(weight: Tensor, numbers: Mapping[Linear, int], names: KeptNames) -> Any:
    """The embedding's weight: a name, or the number of the leaf whose rows it has."""
    if not isinstance(weight, PackedTable):
        name = names.of(weight)
    elif isinstance(weight.owner, Linear):
        return numbers[weight.owner]
    else:
        name = names.of(weight.owner.packed)
    if name is None:
        raise NotStorable("an embedding whose weight has no name")
    return name


def _describe_place(place: Place, numbers: Mapping[Linear, int], embedding: Place) -> Any:
    is_embedding = place.module is embedding.module
    if not is_embedding and place.module not in numbers:
        raise NotStorable(f"{place.site.name} is no linear layer")
    return {
        "site": dataclasses.asdict(place.site),
        "module": None if is_embedding else numbers[place.module],
        "leaf": place.leaf,
        "start": place.start,
        "end": place.end,
        "attribute": place.attribute,
    }


# --- and back ---


def restore_parts(stored: Any, names: KeptNames, open_vision: OpenVision | None) -> Parts:
    """What `describe_parts` described, over the same values."""
    dtype = DTYPES[stored["dtype"]]
    linears = [_restore_leaf(leaf, names, dtype) for leaf in stored["leaves"]]
    table = _restore_table(stored, linears, names, dtype)
    embedding = Embedding(table)
    places = {
        place.site.name: place
        for place in (_restore_place(p, linears, embedding) for p in stored["places"])
    }
    (first,) = (p for p in places.values() if p.site.kind is SiteKind.EMBEDDING)
    output = linears[stored["head"]]
    family = None
    if stored["family"] is not None:
        family = VisionFamily(**{**stored["family"], "tensors": tuple(stored["family"]["tensors"])})
    has_tower = stored["tower"] is not None
    if has_tower and family is not None and open_vision is not None:
        open_vision = partial(
            _open_stored, stored["tower"], family, linears, names, places, open_vision
        )
    return Parts(
        leaves=Leaves(
            sites={
                name: ours.Site(leaf=linears[number], start=start, end=end)
                for name, (number, start, end) in stored["sites"].items()
            },
            transposed=set(stored["transposed"]),
        ),
        backbone=Backbone(embedding),
        head=output,
        output=output,
        dtype=dtype,
        hidden_size=stored["hidden_size"],
        layers=(),
        places=Places(
            by_name=places,
            num_leaves=stored["num_leaves"],
            head=None if stored["head_place"] is None else places[stored["head_place"]],
            embedding=first,
            is_tied=stored["is_tied"],
        ),
        family=family,
        open_vision=open_vision,
        is_vision_stored=has_tower,
    )


def _open_stored(  # noqa: PLR0913 (what a tower is made of)
    stored: Any,
    family: VisionFamily,
    linears: list[Linear],
    names: KeptNames,
    places: Mapping[str, Place],
    open_class: OpenVision,
    step: TowerStep,
) -> VisionParts:
    """Tower and projector as they were recorded."""
    for place in places.values():
        if place.site.part is not SitePart.LANGUAGE:
            place.module.adapters, place.module.number = step, place.leaf
    root = StoredTower(stored, linears, names.find, partial(open_class, step))
    return VisionParts(family=family, root=root, root_name="", language_name="", tower_name="")


def _restore_leaf(stored: Any, names: KeptNames, dtype: torch.dtype) -> Linear:
    weight, bias, in_features, out_features, out = stored
    leaf = Linear(in_features, out_features, has_bias=bias is not None, dtype=dtype)
    leaf.packed = names.find(weight)
    leaf.bias = None if bias is None else names.find(bias)
    leaf.out_dtype = None if out is None else DTYPES[out]
    return leaf


def _restore_table(
    stored: Any, linears: list[Linear], names: KeptNames, dtype: torch.dtype
) -> Tensor:
    place = stored["embedding"]
    owner: Linear | Rows
    if isinstance(place, int):
        owner = linears[place]
    else:
        kept = names.find(place)
        if isinstance(kept, Tensor):
            return kept
        owner = Rows(kept)
    (site,) = (p["site"] for p in stored["places"] if p["site"]["kind"] == SiteKind.EMBEDDING)
    meta = torch.empty((site["in_features"], site["out_features"]), dtype=dtype, device="meta")
    return PackedTable.of(owner, meta)


def _restore_place(stored: Any, linears: list[Linear], embedding: Embedding) -> Place:
    site = stored["site"]
    kinds = {"kind": SiteKind(site["kind"]), "part": SitePart(site["part"])}
    return Place(
        site=Site(**{**site, **kinds}),
        module=embedding if stored["module"] is None else linears[stored["module"]],
        leaf=stored["leaf"],
        start=stored["start"],
        end=stored["end"],
        attribute=stored["attribute"],
    )
