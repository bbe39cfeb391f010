"""`plait demo`: a tour of the default model in the terminal."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import typer

from plait.platform.cli.command import FAILED
from plait.platform.cli.settings import engine_options
from plait.platform.cli.sources import Resolved

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 10  # of the column that says who speaks


def demo(*, flags: Resolved) -> None:
    """Show in some seconds what the default model does: adapters, a picture, a form, drafts.

    Exit code 0: all held that must; 1: something did not.
    """
    from rich.console import Console

    options = engine_options(flags)
    console = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    console.print("[dim]starting the engine in this process …[/]")
    from plait.platform.api import LLM
    from plait.platform.demo import tour

    with LLM(**dataclasses.asdict(options)) as llm:
        model, adapters = llm.config.model, ", ".join(llm.list_adapters())
        console.print(f"{model.name}, adapters {adapters}; {time.perf_counter() - began:.1f} s")
        held = tour.run(llm, _Terminal(console))
    console.print(f"\n{time.perf_counter() - began:.1f} s in all. Over HTTP: plait serve")
    if not held:
        raise typer.Exit(FAILED)


class _Terminal:
    """Tells the tour in the terminal; plainly where there is none."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stop(self, title: str, why: str) -> None:
        self._console.print(f"\n[bold]{title}[/] [dim]· {why}[/]")

    def said(self, who: str, text: str) -> None:
        lines = text.strip().splitlines() or [""]
        shown = " ".join(line.strip() for line in lines)
        self._console.print(f"  [dim]{who:<{_WIDTH}}[/]", end="")
        self._console.out(shown, highlight=False)

    def held(self, what: str, *, true: bool) -> None:
        mark, colour = ("✓", "green") if true else ("✗", "red")
        self._console.print(f"  [{colour}]{mark} {what}[/]")
