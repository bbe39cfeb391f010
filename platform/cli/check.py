"""`plait check MODEL`: can it be served here, and with what? No weights are read."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.platform.cli.banner import speculation
from plait.platform.cli.command import FAILED
from plait.platform.cli.settings import engine_options
from plait.platform.cli.sources import Resolved
from plait.platform.cli.values import format_size

if TYPE_CHECKING:
    from plait.platform.budget import Fit
    from plait.platform.config import Options
    from plait.platform.model import SupportReport


def check(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", show_default=False, metavar="")
    ] = False,
    *,
    flags: Resolved,
) -> None:
    """Say whether MODEL can be served here, by what and in how much memory, or why not.

    Exit code 0: it can; 1: it cannot.
    """
    from plait.platform.starting.light_imports import import_transformers

    import_transformers()
    from plait.platform.demo.default import with_default
    from plait.platform.model import check_model

    options = with_default(engine_options(flags))
    report = _with_images(options, check_model(options))
    fit, why_not = _fit(options, report) if report.servable else (None, report.reason)
    if as_json:
        typer.echo(json.dumps(_as_data(report, fit, why_not), indent=2))
    else:
        _print(options, report, fit, why_not)
    if fit is None:
        raise typer.Exit(FAILED)


def _with_images(options: Options, report: SupportReport) -> SupportReport:
    """The report, which is of the model alone, with what becomes of its images."""
    from plait.platform.errors import PlaitError
    from plait.platform.model.locating import locate
    from plait.vision.early import check_family, check_processor

    if report.vision is None or not report.servable or options.encoder_cache_bytes == 0:
        return report
    try:
        check_family(options)
        check_processor(options, locate(options).path, report.vision)
    except PlaitError as error:
        return dataclasses.replace(report, servable=False, reason=error.message)
    return report


def _fit(options: Options, report: SupportReport) -> tuple[Fit | None, str | None]:
    """What would be chosen on this machine now, or why nothing fits."""
    from plait.platform import budget
    from plait.platform.config import ModelInfo
    from plait.platform.errors import ConfigError

    assert report.architecture is not None, "a servable model has one"
    assert report.executor is not None, "a servable model has one"
    assert report.dtype is not None, "a servable model has one"
    info = ModelInfo(
        name=report.model,
        architecture=report.architecture,
        source="",
        dtype=report.dtype,
        executor=report.executor,
        vocab_size=0,
        context_length=report.context_length,
        eos_token_ids=(),
        weight_bytes=report.weight_bytes,
        vision=report.vision,
    )
    available = budget.available_bytes() - report.weight_bytes
    if available <= 0:
        return None, (
            f"the weights take {format_size(report.weight_bytes)}, and "
            f"{format_size(available + report.weight_bytes)} of memory are free"
        )
    try:
        return budget.fit(options, info, report.kv_groups, report.dtype, available), None
    except ConfigError as error:
        return None, error.message


def _as_data(report: SupportReport, fit: Fit | None, why_not: str | None) -> dict[str, Any]:
    data = dataclasses.asdict(report)
    data |= {"servable": fit is not None, "reason": why_not}
    if fit is not None:
        data |= {
            "max_model_len": fit.scheduler.max_model_len,
            "kv_tokens": fit.cache.num_tokens,
            "kv_bytes": fit.kv_bytes,
            "encoder_bytes": fit.encoder_bytes,
            "memory_bytes": report.weight_bytes + fit.kv_bytes + fit.encoder_bytes,
            "arithmetic": list(fit.arithmetic),
        }
    return data


def _images(options: Options, report: SupportReport) -> str:
    if report.vision is None:
        return "none are taken"
    if options.encoder_cache_bytes == 0:
        return "refused, as --encoder-cache-memory 0 asks"
    return f"taken, as {report.vision.family}"


def _weights(report: SupportReport) -> str:
    """What they are kept as in memory."""
    return ", ".join(f"{format_size(size)} {name}" for name, size in report.weight_formats)


def _print(options: Options, report: SupportReport, fit: Fit | None, why_not: str | None) -> None:
    if fit is None:
        typer.echo(f"{report.model} cannot be served: {why_not}")
        return
    rows = [
        ("architecture", f"{report.architecture}, {report.num_parameters / 1e6:,.0f} M parameters"),
        ("executor", f"{report.executor}, {report.dtype}"),
        ("weights", _weights(report)),
        ("context", f"{fit.scheduler.max_model_len:,} tokens"),
        ("KV cache", f"{fit.cache.num_tokens:,} tokens fit"),
        ("speculation", speculation(options)),
        ("images", _images(options, report)),
        ("adapters", f"can change {report.num_adapter_sites} places"),
        *(("memory", line) for line in fit.arithmetic),
        *(("program", line) for line in report.program),
        *(("note", note) for note in report.notes),
    ]
    typer.echo(f"{report.model} can be served")
    last = ""
    for name, text in rows:
        typer.echo(f"  {'' if name == last else name:<13} {text}")
        last = name
