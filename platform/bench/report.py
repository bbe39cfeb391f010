"""Reports for people (tables) and for programs (JSON)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from plait.platform.errors import ConfigError

LATENCIES = {
    "ttft_ms": "TTFT",
    "itl_ms": "between tokens",
    "tpot_ms": "per token",
    "e2e_ms": "whole",
}


def throughput_table(results: list[dict[str, Any]]) -> Table:
    """Rates by batch size and runner; ratios of the first runner to the others."""
    names = list(results[0]["runners"])
    table = Table(
        "batch",
        Column(no_wrap=True),
        *(Column(title, justify="right") for title in ("decode", "in all", "prefill", "TTFT s")),
        caption="tokens per second; decode: once all prompts are done; TTFT: of the last prompt",
    )
    for result in results:
        for name in names:
            rates = result["runners"][name]
            batch = str(result["batch_size"]) if name == names[0] else ""
            table.add_row(
                batch,
                name,
                f"{rates['decode_rate']:.1f}",
                f"{rates['output_rate']:.1f}",
                f"{rates['prefill_rate']:.0f}",
                f"{rates['ttft_s']:.2f}",
            )
        for name, ratios in result["ratios"].items():
            table.add_row(
                "",
                f"[bold]× {name}[/]",
                *(
                    f"[bold]{ratios[r]:.2f}[/]"
                    for r in ("decode_rate", "output_rate", "prefill_rate")
                ),
                "",
            )
        table.add_section()
    return table


def latency_table(groups: Iterable[tuple[str, dict[str, Any]]]) -> Table:
    """Percentiles in milliseconds, one group of rows per name and its figures."""
    table = Table(
        Column(no_wrap=True),
        "milliseconds",
        *(Column(title, justify="right") for title in ("mean", "p50", "p90", "p99")),
    )
    for name, figures in groups:
        shown = name
        for key, title in LATENCIES.items():
            if key in figures:
                values = (f"{figures[key][p]:.1f}" for p in ("mean", "p50", "p90", "p99"))
                table.add_row(shown, title, *values)
                shown = ""
        table.add_section()
    return table


def show(table: Table, *, to_stderr: bool = False) -> None:
    """Print a table; on stderr where stdout carries JSON."""
    Console(stderr=to_stderr).print(table)


def write_json(report: dict[str, Any], path: str) -> None:
    """Write a report; "-" is standard output. A figure that does not exist becomes null."""
    text = json.dumps(_without_nan(report), indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --json {path}: {error.strerror}", param="json") from None


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
