"""Experts as PEFT's `target_parameters` writes them: stacked, nested, and once the wrong way round.

Two targeted parameters of one module are two wrappers, one in the other: the tensors of the one
that the model has first lie a level deeper, at `base_layer`. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from plait.adapters.names import Role, Target
from plait.adapters.peft_config import PeftConfig
from plait.adapters.plan import Layout, LowRankPlan
from plait.adapters.sites import Site, SiteKind
from plait.adapters.targets import is_target_parameter
from plait.platform.errors import InvalidAdapter

Shapes = Mapping[str, tuple[int, ...]]
Pair = tuple[str, str]  # names of a and b


def pair(roles: Mapping[Role, str], kind: SiteKind) -> Pair:
    """The names of a and b. Raises `InvalidAdapter` where one lacks the other."""
    is_embedding = kind == SiteKind.EMBEDDING
    first = Role.EMBEDDING_A if is_embedding else Role.A
    second = Role.EMBEDDING_B if is_embedding else Role.B
    for role, other in ((first, second), (second, first)):
        if role not in roles:
            found = roles.get(other) or next(iter(roles.values()))
            raise InvalidAdapter(f"{found} stands without its {role.value}")
    return roles[first], roles[second]


def plan_parameters(
    module: str,
    sites: Iterable[Site],
    levels: Mapping[str, Pair],
    shapes: Shapes,
    config: PeftConfig,
) -> list[LowRankPlan]:
    """The one or two targeted parameters of an experts' module.

    `sites` are the module's parameters in the model's order, `levels` what the file has of it,
    the inner first.
    """
    by_name = {f"{module}.{site.name.rpartition('.')[2]}": site for site in sites}
    names = [name for name in by_name if is_target_parameter(config, name)]
    if len(names) != len(levels):
        raise InvalidAdapter(
            f"{module}: target_parameters names {len(names)} of its parameters, and the file has "
            f"tensors of {len(levels)}"
        )
    for order in (names, names[::-1]):
        plans = [
            _parameter(name, tensors, by_name[name], shapes, config)
            for name, tensors in zip(order, levels.values(), strict=True)
        ]
        if all(plans):
            return [plan for plan in plans if plan]
    raise InvalidAdapter(
        f"{module}: the tensors fit none of its parameters "
        f"{', '.join(name.rpartition('.')[2] for name in names)}: "
        + ", ".join(f"{n} {list(shapes[n])}" for tensors in levels.values() for n in tensors)
    )


def _parameter(
    name: str, tensors: Pair, site: Site, shapes: Shapes, config: PeftConfig
) -> LowRankPlan | None:
    """How a pair of tensors is this parameter's, if it can be."""
    a, b = tensors
    rank = config.rank(name)
    stacked = rank * site.num_experts
    sizes = (site.in_features, site.out_features)
    found = [
        layout
        for layout, (i, o) in (
            (Layout.EXPERTS, sizes),
            (Layout.EXPERTS_SWAPPED, sizes[::-1]),
        )
        if shapes[a] == (stacked, i)
        and shapes[b] == (o, stacked)
        # A transposed base's inputs were never taken for outputs.
        and not (site.is_transposed and layout is Layout.EXPERTS_SWAPPED)
    ]
    if not found:
        return None
    return LowRankPlan(
        target=Target(site),
        layout=found[0] if len(found) == 1 else _layout_by_version(name, config),
        rank=rank,
        scale=config.scale(name),
        a=a,
        b=b,
    )


def _layout_by_version(name: str, config: PeftConfig) -> Layout:
    numbers = config.peft_version.split(".")
    if len(numbers) < 3 or not all(n.isdecimal() for n in numbers[:3]):
        raise InvalidAdapter(
            f"{name}: inputs and outputs are equally many, and without a released peft_version in "
            "the config it is open which of the tensors is which"
        )
    is_new = (int(numbers[0]), int(numbers[1])) >= (0, 19)
    return Layout.EXPERTS if is_new else Layout.EXPERTS_SWAPPED
