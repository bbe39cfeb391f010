"""`plait complete`: continue one text."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from plait.platform.cli.answering import Pace
from plait.platform.cli.sources import Resolved
from plait.platform.cli.values import piped, unicode_text
from plait.platform.errors import ConfigError


def complete(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue. Default: standard input.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", help="As MODEL of `plait serve`.", show_default=False
        ),
    ] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show text as it comes.", show_default=False)
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print TTFT and rate.", show_default=False)
    ] = False,
    *,
    flags: Resolved,
) -> None:
    """Continue PROMPT with MODEL's text (no chat template)."""
    from plait.platform.cli.asking import open_answerer, sampling_params

    params = sampling_params(flags)
    # The line break that ends piped text is the shell's, not the prompt's.
    text = (
        unicode_text(prompt)
        if prompt is not None
        else piped(lambda stdin: stdin.read()).removesuffix("\n")
    )
    if not text:
        raise ConfigError("the prompt is empty: give it as PROMPT or on standard input")
    pace, parts = Pace.begin(), []
    with closing(open_answerer(flags, model)) as answerer:
        pace = Pace.begin()
        for piece in answerer.complete(text, params):
            pace.add(piece)
            if stream:
                typer.echo(piece.text, nl=False)
            parts.append(piece.text)
    typer.echo("" if stream else "".join(parts))
    if stats:
        typer.echo(f"[{pace}]", err=True)
