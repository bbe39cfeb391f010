"""Several adapters in one request: which lists of them mean something, and where each begins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.platform.core import AdapterUse
from plait.platform.errors import BadRequest

if TYPE_CHECKING:
    from plait.adapters.info import AdapterInfo

MAX_ADAPTERS = 8  # of one request
MAX_SCALE = 100.0  # either side of 0
_REPLACES = ("rows", "whole")  # kinds of sites whose weights stand in the base's place


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One adapter of a request, found by its name (or generation)."""

    name: str
    info: AdapterInfo
    scale: float = 1.0


def check_scale(name: str, scale: float, param: str) -> None:
    """Raises `BadRequest` unless the scale is a number that can be meant."""
    if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
        raise BadRequest(
            f"adapter {name[:64]!r}: scale must lie in [-{MAX_SCALE:g}, {MAX_SCALE:g}]",
            param=param,
        )


def compose(adapters: Sequence[Chosen], param: str) -> tuple[Chosen, ...]:
    """The adapters that change something: a scale of 0 drops one. Raises `BadRequest` by name."""
    if len(adapters) > MAX_ADAPTERS:
        raise BadRequest(
            f"{len(adapters)} adapters in one request; at most {MAX_ADAPTERS}", param=param
        )
    for one in adapters:
        check_scale(one.name, one.scale, param)
    _check_distinct(adapters, param)
    kept = tuple(one for one in adapters if one.scale != 0.0)
    for one in kept:
        _check_dora(one, kept, param)
    _check_replaced(kept, param)
    return kept


def _check_distinct(adapters: Sequence[Chosen], param: str) -> None:
    first: dict[str, str] = {}
    for one in adapters:
        other = first.setdefault(one.info.generation, one.name)
        if other != one.name:
            raise BadRequest(
                f"adapters {other!r} and {one.name!r} are the same: give it once", param=param
            )
    if len(first) != len(adapters):
        raise BadRequest("adapters: the same adapter stands there twice", param=param)


def _check_dora(one: Chosen, adapters: Sequence[Chosen], param: str) -> None:
    if not one.info.has_dora:
        return
    if len(adapters) > 1:
        raise BadRequest(
            f"adapter {one.name!r} is a DoRA adapter, which rescales the base model's own output: "
            "it cannot be combined with others",
            param=param,
        )
    if one.scale != 1.0:
        raise BadRequest(
            f"adapter {one.name!r} is a DoRA adapter, whose norms hold at scale 1 only",
            param=param,
        )


def _check_replaced(adapters: Sequence[Chosen], param: str) -> None:
    """A weight that stands in the base's place has no scale, and room for one only."""
    by_site: dict[str, str] = {}
    for one in adapters:
        for site in one.info.report.sites:
            if site.kind not in _REPLACES:
                continue
            if one.scale != 1.0:
                raise BadRequest(
                    f"adapter {one.name!r} replaces weights of {site.name}: its scale can only "
                    "be 1",
                    param=param,
                )
            other = by_site.setdefault(site.name, one.name)
            if other != one.name:
                raise BadRequest(
                    f"adapters {other!r} and {one.name!r} both replace weights of {site.name}: "
                    "use one of them",
                    param=param,
                )


def uses(
    adapters: Sequence[tuple[AdapterInfo, float]], prompt: tuple[int, ...]
) -> Iterator[tuple[AdapterInfo, AdapterUse]]:
    """What the engine is told of each adapter that this prompt wakes.

    One that waits for its invocation is active from the start of the last one in the prompt on;
    a prompt without any is the base model's.
    """
    for info, scale in adapters:
        start = last_occurrence(prompt, info.invocation_token_ids)
        if start is not None:
            yield (
                info,
                AdapterUse(
                    generation=info.generation,
                    scale=scale,
                    active_from=start,
                    kv_digest=info.kv_digest,
                    tower_digest=info.tower_digest,
                    draft=info.draft,
                ),
            )


def last_occurrence(tokens: tuple[int, ...], sought: tuple[int, ...]) -> int | None:
    """Where `sought` last begins in `tokens`; 0 where nothing is sought, None without any."""
    if not sought:
        return 0
    size = len(sought)
    for start in range(len(tokens) - size, -1, -1):
        if tokens[start] == sought[0] and tokens[start : start + size] == sought:
            return start
    return None
