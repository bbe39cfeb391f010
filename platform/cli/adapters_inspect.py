"""`plait adapters inspect`: what is in an adapter, and does it fit a model? Loads neither.

Without a model its own names and shapes are all there is to go by: rank, scale and size of each
change. With `--model` it is matched with the places of that model, whose weights are not read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.platform.cli.command import FAILED, reporting
from plait.platform.cli.values import format_size
from plait.platform.errors import AdapterError

if TYPE_CHECKING:
    from plait.adapters.adapter import Adapter
    from plait.adapters.info import LoadReport, SiteReport
    from plait.adapters.loading import SitesOf

_NO_LIMIT = 1 << 31
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def inspect(
    path: Annotated[str, typer.Argument(help="Directory or hub id of an adapter.", metavar="PATH")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Directory, GGUF file or hub id of a base to match it with; "
            '"embedded" is the built-in one.',
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", show_default=False, metavar="")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Download nothing.", show_default=False, metavar="")
    ] = False,
) -> None:
    """Say what an adapter changes and how much, or why it cannot be loaded.

    Exit code 0: it can; 1: it cannot.
    """
    with reporting(debug=False):
        if offline:  # must be there before any library looks
            os.environ["HF_HUB_OFFLINE"] = "1"
        data = look_at(path, model, offline=offline)
        typer.echo(json.dumps(data, indent=2) if as_json else "\n".join(as_text(path, data)))
        if not data["loadable"]:
            raise typer.Exit(FAILED)


def look_at(path: str, model: str | None, *, offline: bool = False) -> dict[str, Any]:
    """What was found, as JSON has it."""
    from plait.adapters.loading import inspect_adapter
    from plait.adapters.sources import find_adapter

    try:
        sites = _sites(model)
        directory = find_adapter(path, offline=offline).directory
        _check_bundle(directory)
        adapter = inspect_adapter(directory, sites, max_rank=_NO_LIMIT)
    except AdapterError as error:
        found = {"loadable": False, "code": error.code, "message": error.message}
        if dataclasses.is_dataclass(error.report) and not isinstance(error.report, type):
            found["report"] = dataclasses.asdict(error.report)
        return found
    return _facts(adapter, is_zero=adapter.info.changes_nothing)


def _sites(model: str | None) -> SitesOf:
    if model is None:
        from plait.adapters.guess import guess_sites

        return guess_sites
    import torch

    from plait.platform.config import Options
    from plait.platform.demo.default import with_default
    from plait.platform.model.build import build_skeleton
    from plait.platform.model.source import find_checkpoint

    options = with_default(Options(model=None if model == "embedded" else model))
    checkpoint = find_checkpoint(options)
    skeleton = build_skeleton(checkpoint, torch.bfloat16)
    return skeleton.places.sites(vocab_size=skeleton.vocab_size, model_name=checkpoint.name)


def _check_bundle(directory: Path) -> None:
    from plait.adapters.bundle import parse_bundle
    from plait.adapters.files import BUNDLE, FileLimits, open_directory, read_small

    limits = FileLimits()
    with open_directory(directory) as folder:
        try:
            data = read_small(folder, BUNDLE, limit=limits.bundle_bytes, follow_links=True)
        except FileNotFoundError:
            return
    parse_bundle(data, limits)


def _facts(adapter: Adapter, *, is_zero: bool) -> dict[str, Any]:
    info = adapter.info
    return {
        "loadable": not is_zero,
        **({"message": "it changes nothing (allow_zero_delta)"} if is_zero else {}),
        "generation": info.generation,
        "base_model": info.base_model,
        "max_rank": max((site.rank for site in info.report.sites), default=0),
        "has_dora": info.has_dora,
        "invocation_token_ids": list(info.invocation_token_ids),
        "vocab_size": info.vocab_size,
        "report": dataclasses.asdict(info.report),
    }


def as_text(path: str, data: dict[str, Any]) -> list[str]:
    """The same for people."""
    from plait.adapters.info import LoadReport, SiteReport

    fields = dict(data.get("report", {}))
    sites = tuple(SiteReport(**site) for site in fields.pop("sites", ()))
    report = LoadReport(**fields, sites=sites)
    if data["loadable"]:
        lines = [f"{path} can be loaded"]
    else:
        lines = [f"{path} cannot be loaded: {data['message']}"]
    lines += [f"  unmatched  {name}" for name in report.unmatched]
    if sites:
        lines += _lines(data, report)
    return lines


def _lines(data: dict[str, Any], report: LoadReport) -> list[str]:
    changes = [
        name for name in ("kv", "tower", "head", "vocabulary") if getattr(report, f"changes_{name}")
    ]
    return [
        f"  generation  {data['generation']}",
        *([f"  trained on  {data['base_model']}"] if data["base_model"] else []),
        f"  in memory   {format_size(report.num_bytes)}, {report.num_tensors} tensors",
        f"  changes     {', '.join(changes) or 'nothing but single layers'}",
        *_grouped(report.sites),
        *(f"  warning     {text}" for text in report.warnings),
    ]


def _grouped(sites: Iterable[SiteReport]) -> list[str]:
    """One line for sites that differ in their layer alone."""
    groups: dict[tuple[str, str, int, float], list[float]] = {}
    for site in sites:
        key = (_NUMBER.sub("*", site.name), site.kind, site.rank, site.scale)
        groups.setdefault(key, []).append(site.change_norm)
    width = max((len(name) for name, *_ in groups), default=0)
    return [
        f"  {name:<{width}}  {len(norms):>4} × {kind}"
        + (f", rank {rank}, scale {scale:.4g}" if rank else "")
        + f", size {min(norms):.3g} … {max(norms):.3g}"
        for (name, kind, rank, scale), norms in groups.items()
    ]
