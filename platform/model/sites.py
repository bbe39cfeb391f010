"""Which places of a model adapters can change, and where each of them went.

Names are transformers' own, though the leaves behind them may be merged: a `Place` tells which
rows of which leaf a site is. A linear is a site only where the probe saw it take the step's rows as
they are: what runs on a selection of rows (or not at all) could be given another row's adapter.
Norms and routers that are bare parameters are no sites. Linears of a vision tower and its projector
are, all of them: an image's rows there have one set of adapters, whatever runs on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from plait.adapters.sites import Site, SiteKind, SitePart
from plait.platform.model.experts import is_experts, projections
from plait.platform.model.leaves import Leaves, Linear
from plait.platform.model.places import Place, Places
from plait.platform.model.probe import NUM_ROWS, LayerAttention

# In the last decoder layer, what comes after that layer's keys and values are made, or beside them.
# Anything that is not listed counts as changing them, which costs sharing and nothing else.
_AFTER_LAST_KV = re.compile(
    r"\.(q_proj|query|wq|q_a_proj|q_b_proj|o_proj|out_proj|wo|dense"
    r"|gate_proj|up_proj|gate_up_proj|down_proj|w1|w2|w3|fc1|fc2|c_fc|c_proj"
    r"|dense_h_to_4h|dense_4h_to_h)$"
)
PartOf = Callable[[str], SitePart]
_NUMBER = re.compile(r"\.(\d+)(?=\.)")


def _only_language(name: str) -> SitePart:  # noqa: ARG001 - one of `PartOf`
    return SitePart.LANGUAGE


def find_places(
    model: Any, leaves: Leaves, layers: Iterable[LayerAttention], tied: Mapping[str, str],
    part_of: PartOf = _only_language,
) -> Places:  # fmt: skip
    """Number the leaves of a probed model that has no weights yet, and name its places.

    `part_of` tells the part that a module belongs to, by its name.
    """
    names = {module: name for name, module in model.named_modules()}
    prefixes = _layer_prefixes(layers, names)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    places = {p.site.name: p for p in _linears(leaves, prefixes, head, part_of)}
    num_leaves = 1 + max((place.leaf for place in places.values()), default=-1)
    for place in _experts(model, prefixes, num_leaves):
        places[place.site.name] = place
        num_leaves = place.leaf + place.site.num_experts
    first = _embedding(embedding, names[embedding], num_leaves)
    places[first.site.name] = first
    head_name = names.get(head, "")
    return Places(
        by_name=places,
        num_leaves=num_leaves + 1,
        head=places.get(head_name),
        embedding=first,
        is_tied=_is_tied(tied, first.site.name, head_name),
    )


def _embedding(module: Any, name: str, leaf: int) -> Place:
    site = Site(
        name=name,
        kind=SiteKind.EMBEDDING,
        in_features=module.num_embeddings,
        out_features=module.embedding_dim,
    )
    return Place(site=site, module=module, leaf=leaf, start=0, end=site.out_features)


def _layer_prefixes(
    layers: Iterable[LayerAttention], names: Mapping[nn.Module, str]
) -> dict[str, int]:
    """Module name of each decoder layer → its number, by the name of its attention."""
    prefixes: dict[str, int] = {}
    for layer in layers:
        for found in _NUMBER.finditer(names[layer.module]):
            if int(found.group(1)) == layer.layer:
                prefixes[names[layer.module][: found.end()]] = layer.layer
                break
    return prefixes


def _layer_of(name: str, prefixes: Mapping[str, int]) -> int | None:
    for found in _NUMBER.finditer(name):
        layer = prefixes.get(name[: found.end()])
        if layer is not None:
            return layer
    return None


def _affects_kv(name: str, layer: int | None, prefixes: Mapping[str, int]) -> bool:
    return layer != max(prefixes.values(), default=-1) or not _AFTER_LAST_KV.search(name)


def _linears(
    leaves: Leaves, prefixes: Mapping[str, int], head: nn.Module | None, part_of: PartOf
) -> Iterator[Place]:
    numbers: dict[Linear, int] = {}
    for name, where in leaves.sites.items():
        is_head = where.leaf is head
        part = part_of(name)
        is_probed = is_head or where.leaf.rows_probed == {NUM_ROWS}
        if part is SitePart.LANGUAGE and not is_probed:
            continue
        layer = _layer_of(name, prefixes)
        site = Site(
            name=name,
            part=part,
            kind=SiteKind.HEAD if is_head else SiteKind.LINEAR,
            in_features=where.leaf.in_features,
            out_features=where.end - where.start,
            layer=layer,
            affects_kv=not is_head and _affects_kv(name, layer, prefixes),
            is_transposed=name in leaves.transposed,
        )
        yield Place(
            site=site,
            module=where.leaf,
            leaf=numbers.setdefault(where.leaf, len(numbers)),
            start=where.start,
            end=where.end,
        )


def _experts(model: nn.Module, prefixes: Mapping[str, int], first: int) -> Iterator[Place]:
    for name, module in model.named_modules():
        if not is_experts(module):
            continue
        for attribute in projections(module):
            num_experts, *sizes = getattr(module, attribute).shape
            is_transposed = bool(module.is_transposed)
            in_features, out_features = sizes if is_transposed else reversed(sizes)
            full_name = f"{name}.{attribute}"
            layer = _layer_of(full_name, prefixes)
            site = Site(
                name=full_name,
                kind=SiteKind.EXPERTS,
                in_features=in_features,
                out_features=out_features,
                layer=layer,
                affects_kv=_affects_kv(full_name, layer, prefixes),
                num_experts=num_experts,
                is_transposed=is_transposed,
            )
            yield Place(
                site=site, module=module, leaf=first, start=0, end=out_features,
                attribute=attribute,
            )  # fmt: skip
            first += num_experts


def _is_tied(tied: Mapping[str, str], embedding: str, head: str) -> bool:
    pair = {f"{embedding}.weight", f"{head}.weight"}
    return any({target, origin} == pair for target, origin in tied.items())
