"""The sites that an adapter's files themselves suggest, to look at one without its model.

Shapes and names say where the adapter would go; whether a model has such places they cannot say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plait.adapters.header import SafetensorsHeader
from plait.adapters.names import Role, by_module
from plait.adapters.peft_config import PeftConfig
from plait.adapters.sites import ModelSites, Site, SiteKind
from plait.adapters.targets import is_target_module, is_target_parameter

_HEADS = ("lm_head", "embed_out", "output")

Shape = tuple[int, ...]


def guess_sites(config: PeftConfig, header: SafetensorsHeader) -> ModelSites:
    """Sites that fit every tensor of the file, as far as its names are PEFT's."""
    shapes = {entry.name: entry.shape for entry in header.tensors}
    found: dict[str, Site] = {}
    for module, roles in by_module(shapes).modules.items():
        sizes = {role: shapes[name] for role, name in roles.items()}
        for site in _sites(module, sizes, config):
            found[site.name] = site
    tables = [s for s in found.values() if s.kind in (SiteKind.EMBEDDING, SiteKind.HEAD)]
    rows = (s.in_features if s.kind == SiteKind.EMBEDDING else s.out_features for s in tables)
    return ModelSites(
        sites=found,
        is_tied=False,
        vocab_size=max(rows, default=1 << 31),
        model_name=config.base_model or "its model",
    )


def _sites(module: str, sizes: Mapping[Role, Shape], config: PeftConfig) -> Iterator[Site]:
    is_head = module.rpartition(".")[2] in _HEADS
    has_table = bool({Role.WEIGHT, Role.TOKENS} & sizes.keys())
    if Role.EMBEDDING_A in sizes or Role.EMBEDDING_B in sizes or (has_table and not is_head):
        yield _table(module, sizes, config, SiteKind.EMBEDDING)
    elif is_head:
        yield _table(module, sizes, config, SiteKind.HEAD)
    elif not is_target_module(config, module) and config.target_parameters:
        yield from _parameters(module.removesuffix(".base_layer"), module, sizes, config)
    else:
        yield _linear(module, sizes)


def _linear(module: str, sizes: Mapping[Role, Shape]) -> Site:
    return Site(
        name=module,
        kind=SiteKind.LINEAR,
        in_features=_size(sizes.get(Role.A), -1),
        out_features=_size(sizes.get(Role.B), 0),
    )


def _table(module: str, sizes: Mapping[Role, Shape], config: PeftConfig, kind: SiteKind) -> Site:
    """Rows by what is widest: the saved weight, the low-rank change, the tokens that are named."""
    is_head = kind == SiteKind.HEAD
    tokens = [t for ids in config.trained_tokens.values() for t in ids]
    low_rank = (Role.B, 0) if is_head else (Role.EMBEDDING_A, -1)
    rows = max(
        _size(sizes.get(Role.WEIGHT), 0),
        _size(sizes.get(low_rank[0]), low_rank[1]),
        max(tokens, default=0) + 1 if Role.TOKENS in sizes else 0,
    )
    width = max(
        _size(sizes.get(Role.WEIGHT), -1),
        _size(sizes.get(Role.TOKENS), -1),
        _size(sizes.get(Role.A), -1) if is_head else _size(sizes.get(Role.EMBEDDING_B), 0),
    )
    return Site(
        name=module,
        kind=kind,
        in_features=width if is_head else rows,
        out_features=rows if is_head else width,
        affects_kv=not is_head,
    )


def _parameters(
    module: str, level: str, sizes: Mapping[Role, Shape], config: PeftConfig
) -> Iterator[Site]:
    """The experts' parameter whose tensors lie at a level of PEFT's nesting."""
    names = sorted(
        {f"{module}.{t.rpartition('.')[2]}" for t in config.target_parameters},
        key=lambda name: (name.endswith(("down_proj", "w2")), name),
    )
    names = [name for name in names if is_target_parameter(config, name)]
    if not names:
        yield _linear(level, sizes)
        return
    name = names[0] if level != module else names[-1]
    yield Site(
        name=name,
        kind=SiteKind.EXPERTS,
        in_features=_size(sizes.get(Role.A), -1),
        out_features=_size(sizes.get(Role.B), 0),
        num_experts=max(1, _size(sizes.get(Role.A), 0) // config.rank(name)),
        is_transposed=True,  # takes the file's word for what are inputs
    )


def _size(shape: Shape | None, at: int) -> int:
    return shape[at] if shape else 0
