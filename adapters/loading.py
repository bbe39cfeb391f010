"""From a directory to an `Adapter`: read, matched with the model's sites, checked, reported.

May run on any thread beside others: it keeps no state and changes no setting of torch. Data are
read once, into the tensors that the adapter keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from plait.adapters.adapter import Adapter, LowRank
from plait.adapters.digests import Part, kv_digest, tower_digest
from plait.adapters.draft_adapter import digest_draft
from plait.adapters.experts import join_halves, split_experts
from plait.adapters.files import (
    BUNDLE,
    CONFIG,
    TOKENIZER_CONFIG,
    WEIGHTS,
    FileLimits,
    open_directory,
    open_weights,
    read_header,
    read_small,
)
from plait.adapters.header import SafetensorsHeader
from plait.adapters.identity import DRAFT, generation_of
from plait.adapters.info import CHANGES_NOTHING, AdapterInfo, LoadReport
from plait.adapters.own_tokenizer import read_own_tokenizer
from plait.adapters.peft_config import PeftConfig, parse_config
from plait.adapters.plan import Layout, LowRankPlan, Plan
from plait.adapters.planning import MAX_LISTED, make_plan
from plait.adapters.report import change_norm, is_change, make_report
from plait.adapters.sites import ModelSites, SiteKind
from plait.adapters.tables import BaseWeight, make_tables
from plait.adapters.tensors import not_finite, read_tensors
from plait.platform.errors import AdapterStorageFailed, InvalidAdapter

# Of a weight, by its Frobenius norm: with more, some input has no product in float32 or bfloat16.
LARGEST_CHANGE = torch.finfo(torch.bfloat16).max

SitesOf = ModelSites | Callable[[PeftConfig, SafetensorsHeader], ModelSites]


def load_adapter(  # noqa: PLR0913 (each is said once, at start)
    generation: str,
    directory: Path,
    sites: ModelSites,
    *,
    max_rank: int,
    allow_zero_delta: bool = False,
    base_weight: BaseWeight | None = None,
    device_dtype: str = "",
) -> Adapter:
    """Read the adapter of `generation` from its directory, whole or not at all.

    `device_dtype` is what it says of itself that its low-rank weights are kept as where it runs.

    PEFT saves an embedding's or head's base weight beside its LoRA. Given `base_weight`, what is
    as in the base is dropped, and a few changed rows are kept as rows; else it is kept whole.

    Raises kinds of `AdapterError`, with a `report` as far as it came.
    """
    # The store names a directory by what is in it.
    is_stored = directory.name == generation and len(generation) == 64
    if is_stored and not all((directory / name).is_file() for name in (CONFIG, WEIGHTS)):
        raise AdapterStorageFailed("the stored adapter is no longer there; load it again")
    files = _read(directory, sites, max_rank)
    if is_stored and files.generation != generation:
        raise AdapterStorageFailed("the stored adapter is not what was stored; load it again")
    adapter = _make(generation, files, max_rank, base_weight)
    if adapter.info.changes_nothing and not allow_zero_delta:
        raise InvalidAdapter(CHANGES_NOTHING, report=adapter.info.report)
    return replace(adapter, info=replace(adapter.info, device_dtype=device_dtype))


def inspect_adapter(directory: Path, sites: SitesOf, *, max_rank: int) -> Adapter:
    """Read the adapter in any directory, under its own generation, to look at it.

    `sites` may be a function that makes them of the files. A change of nothing is no error.
    """
    files = _read(directory, sites, max_rank, follow_links=True)
    return _make(files.generation, files, max_rank, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What a directory holds."""

    generation: str
    config: PeftConfig
    sites: ModelSites
    plan: Plan
    tensors: Mapping[str, Tensor]


def _read(directory: Path, sites: SitesOf, max_rank: int, *, follow_links: bool = False) -> _Files:
    limits = FileLimits()
    with open_directory(directory) as folder:
        small: dict[str, bytes] = {}
        for name in (CONFIG, BUNDLE):
            with contextlib.suppress(FileNotFoundError):
                small[name] = read_small(
                    folder, name, limit=limits.of(name), follow_links=follow_links
                )
        bundle = small.get(BUNDLE)
        draft = digest_draft(folder, bundle, limits, follow_links=follow_links)
        tokenizer = read_own_tokenizer(folder, limits, follow_links=follow_links)
        if tokenizer is not None:
            small[TOKENIZER_CONFIG] = tokenizer
        if CONFIG not in small:
            raise InvalidAdapter(f"{CONFIG} is missing")
        config = parse_config(small[CONFIG], limits)
        with open_weights(folder, limits, follow_links=follow_links) as file:
            raw, header = read_header(file, limits)
            if not isinstance(sites, ModelSites):
                sites = sites(config, header)
            plan = make_plan(config, header, sites, max_rank=max_rank)
            tensors, weights_digest = read_tensors(file, raw, header)
    _check_finite(tensors)
    _check_copies(plan, tensors)
    digests = {name: sha256(data).hexdigest() for name, data in small.items()}
    if draft is not None:
        digests[DRAFT] = draft
    return _Files(
        generation=generation_of({**digests, WEIGHTS: weights_digest}),
        config=config,
        sites=sites,
        plan=plan,
        tensors=tensors,
    )


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    broken = not_finite(tensors)
    if broken:
        raise InvalidAdapter(
            f"{len(broken)} tensors hold NaN or infinity, such as {broken[0]}",
            report=LoadReport(num_tensors=len(tensors), not_finite=broken[:MAX_LISTED]),
        )


def _check_copies(plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    for name, copy in plan.copies:
        if not tensors[name].equal(tensors[copy]):
            raise InvalidAdapter(f"{name} and {copy} are one module's, and differ: which is meant?")


def _too_large(part: LowRank, norm: float) -> str:
    largest = [f"{float(x.abs().max()):.2g}" for x in (part.a, part.b)]
    return (
        f"the change of {part.site.name} has the norm {norm:.2g}, beyond what the model's numbers "
        f"hold: its A has values up to {largest[0]}, its B up to {largest[1]}, its scale is "
        f"{part.scale:.2g}"
    )


def _make(generation: str, files: _Files, max_rank: int, base_weight: BaseWeight | None) -> Adapter:
    plan = files.plan
    tables = make_tables(plan, files.tensors, base_weight)
    adapter = Adapter(
        info=AdapterInfo(generation=generation, report=LoadReport()),
        low_rank=tuple(_low_rank(plan, files.tensors, max_rank)),
        rows=tables.rows,
        wholes=tables.wholes,
    )
    norms = [change_norm(part) for part in adapter.low_rank]
    for part, norm in zip(adapter.low_rank, norms, strict=True):
        if norm > LARGEST_CHANGE:
            raise InvalidAdapter(_too_large(part, norm))
    # A norm of zero may be a small number that vanished when squared: then look again.
    low_rank = (
        part
        for part, norm in zip(adapter.low_rank, norms, strict=True)
        if norm > 0 or is_change(part)
    )
    changes: list[Part] = [*low_rank, *adapter.rows, *adapter.wholes]
    kv, tower = kv_digest(changes), tower_digest(changes)
    report = replace(
        make_report(adapter, norms, tables.norms),
        num_tensors=len(files.tensors),
        changes_kv=bool(kv),
        changes_tower=bool(tower),
        changes_head=any(part.site.kind == SiteKind.HEAD for part in changes),
        changes_vocabulary=plan.vocab_size is not None,
        warnings=(*plan.warnings, *_other_base(files.config, files.sites)),
    )
    info = AdapterInfo(
        generation=generation,
        report=report,
        kv_digest=kv,
        tower_digest=tower,
        invocation_token_ids=files.config.invocation_tokens,
        vocab_size=plan.vocab_size,
        changes_nothing=not changes,
        has_dora=any(part.magnitude is not None for part in adapter.low_rank),
        num_bytes=report.num_bytes,
        base_model=files.config.base_model,
    )
    return replace(adapter, info=info)


def _other_base(config: PeftConfig, sites: ModelSites) -> Iterator[str]:
    name = config.base_model.rstrip("/").rpartition("/")[2]
    if name and name.lower() != sites.model_name.rpartition("/")[2].lower():
        yield f"the adapter was trained on {name!r}, and {sites.model_name!r} is served"


def _low_rank(plan: Plan, tensors: Mapping[str, Tensor], max_rank: int) -> list[LowRank]:
    halves = [p for p in plan.low_rank if p.target.half is not None]
    parts = [
        part for each in plan.low_rank if each.target.half is None for part in _parts(each, tensors)
    ]
    joined = join_halves(
        ((p.target.half or 0, part) for p in halves for part in _parts(p, tensors)), max_rank
    )
    return parts + joined


def _parts(plan: LowRankPlan, tensors: Mapping[str, Tensor]) -> list[LowRank]:
    a, b = tensors[plan.a], tensors[plan.b]
    if plan.layout is Layout.SWAPPED:
        a, b = b.t().contiguous(), a.t().contiguous()
    elif plan.layout is not Layout.PLAIN:
        return split_experts(plan, a, b)
    return [
        LowRank(
            site=plan.target.site,
            a=a,
            b=b,
            scale=plan.scale,
            b_bias=tensors[plan.b_bias] if plan.b_bias else None,
            magnitude=tensors[plan.magnitude] if plan.magnitude else None,
            expert=plan.target.expert,
        )
    ]
