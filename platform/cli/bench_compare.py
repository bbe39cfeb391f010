"""`plait bench compare`: engines side by side; `plait bench peers`: which ones there are."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from plait.platform.cli.bench_flags import Batches, Comparing, Measuring
from plait.platform.cli.sources import Resolved
from plait.platform.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plait.platform.bench.comparing import Comparison

_PLACES = ("--peers-dir", "--bench-dir", "--pages", "--json")


def compare(*, flags: Resolved) -> None:
    """Measure engines in turns on the same prompts, weights and core: ours and what is installed.

    MODEL is a GGUF file, and every engine gets its numbers in a format that it reads; or a
    directory, for engines that read such.
    """
    from plait.platform.bench.compare_report import console_table
    from plait.platform.bench.comparing import run
    from plait.platform.bench.report import show, write_json

    measuring, pages = flags.build(Measuring), flags.build(Comparing).pages
    report = run(_comparison(flags, measuring), _tell) | {"clock": flags["clock"]}
    show(console_table(report), to_stderr=measuring.json == "-")
    if measuring.json:
        write_json(report, measuring.json)
    if pages:
        _write_pages(report, Path(pages))


def peers(*, flags: Resolved) -> None:
    """List the engines that ours can be compared with; with --install, install some.

    Each gets an environment of its own under --peers-dir, with pinned versions, from the package
    index that pip is set up for. Nothing is installed unless it is named.
    """
    from plait.platform.bench.entries import PEERS, python_of
    from plait.platform.bench.install import install, peer_named

    comparing = flags.build(Comparing)
    folder = Path(comparing.peers_dir)
    for peer in [peer_named(name) for name in comparing.install]:
        install(peer, folder, _tell)
    for peer in PEERS:
        state = "installed" if python_of(peer.name, folder) else "not installed"
        packages = ", ".join(peer.packages) or "transformers"
        note = f"; {peer.note}" if peer.note else ""
        typer.echo(f"{peer.name:<14} {state:<14} {packages}: {peer.size}{note}")


def _comparison(flags: Resolved, measuring: Measuring) -> Comparison:
    from plait.platform.bench.comparing import Comparison
    from plait.platform.bench.entries import chosen
    from plait.platform.bench.machine import first_core
    from plait.platform.bench.throughput import Plan
    from plait.platform.demo.embedded import model_path

    comparing, batches = flags.build(Comparing), flags.build(Batches)
    if measuring.output_len < 2:
        raise ConfigError("--output-len must be 2 at least: the first token is prefill")
    return Comparison(
        source=Path(flags["model"]) if flags["model"] else model_path(),
        entries=tuple(chosen(comparing.engines)),
        plan=Plan(
            batch_sizes=batches.batch_sizes,
            input_tokens=measuring.input_len,
            output_tokens=measuring.output_len,
            repeats=measuring.repeats,
            seed=measuring.bench_seed,
        ),
        cores=measuring.cores or first_core(),
        peers=Path(comparing.peers_dir),
        work=Path(comparing.bench_dir),
    )


def _write_pages(report: dict[str, Any], folder: Path) -> None:
    from plait.platform.bench.compare_report import page, plot

    command = shlex.join(["plait", *_without_places(sys.argv[1:])])
    try:
        (folder / "comparison.md").write_text(page(report, command), "utf-8")
        (folder / "comparison.svg").write_text(plot(report), "utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --pages {folder}: {error.strerror}") from None


def _without_places(arguments: Sequence[str]) -> list[str]:
    """A command without where things lie: that is this machine's, and changes no figure."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not is_value and name in _PLACES:
            is_value = not equals
            continue
        if not is_value:
            kept.append(argument)
        is_value = False
    return kept


def _tell(line: str) -> None:
    typer.echo(line, err=True)
