"""The `plait` command. Nothing heavy is imported here: help must be there at once.

A command's own module is imported when it is called, or told of in the help of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from plait.platform.cli.flags import Flag


class OnDemand(TyperGroup):
    """A group whose commands are made when somebody asks for them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """See click: in the order of the table."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """See click. For a name that there is not all are made: those like it are suggested."""
        if cmd_name not in COMMANDS:
            for name in COMMANDS:
                self.get_command(ctx, name)
        elif cmd_name not in self.commands:
            command: Any = typer.main.get_command(COMMANDS[cmd_name]())
            command.name = cmd_name
            self.commands[cmd_name] = command
        return super().get_command(ctx, cmd_name)


def _alone(function: Callable[..., None], **options: Any) -> typer.Typer:
    """An app of one command."""
    alone = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    alone.command(**options)(function)
    return alone


def _flagged(function: Callable[..., None], flags: tuple[Flag, ...], **options: Any) -> typer.Typer:
    """An app of one command that takes these flags."""
    from plait.platform.cli import table
    from plait.platform.cli.command import EPILOG, with_flags

    return _alone(with_flags(flags, table.KNOWN)(function), epilog=EPILOG, **options)


def _serve() -> typer.Typer:
    from plait.platform.cli import serve, table
    from plait.platform.cli.command import OneAdapterEach

    return _flagged(serve.serve, table.SERVE, cls=OneAdapterEach)


def _chat() -> typer.Typer:
    from plait.platform.cli import chat, table

    return _flagged(chat.chat, table.CHAT)


def _complete() -> typer.Typer:
    from plait.platform.cli import complete, table

    return _flagged(complete.complete, table.COMPLETE)


def _demo() -> typer.Typer:
    from plait.platform.cli import demo, table

    return _flagged(demo.demo, table.TOUR)


def _check() -> typer.Typer:
    from plait.platform.cli import check, table

    return _flagged(check.check, table.CHECK)


def _bench() -> typer.Typer:
    from plait.platform.cli import bench

    return bench.app


def _schema() -> typer.Typer:
    from plait.platform.cli import schema

    return schema.app


def _adapters() -> typer.Typer:
    from plait.platform.cli import adapters

    return adapters.app


def _doctor() -> typer.Typer:
    from plait.platform.cli import doctor

    return _alone(doctor.doctor)


def _version() -> typer.Typer:
    from plait.platform.cli import version

    return _alone(version.version)


COMMANDS: dict[str, Callable[[], typer.Typer]] = {
    "serve": _serve,
    "chat": _chat,
    "complete": _complete,
    "demo": _demo,
    "check": _check,
    "bench": _bench,
    "schema": _schema,
    "adapters": _adapters,
    "doctor": _doctor,
    "version": _version,
}

app = typer.Typer(
    cls=OnDemand,
    name="plait",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(is_asked: bool) -> None:
    if not is_asked:
        return
    from importlib.metadata import version

    typer.echo(f"plait {version('plait')}")
    raise typer.Exit


@app.callback()
def plait(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version; `plait version` prints more.",
            callback=_say_version,
            is_eager=True,
            show_default=False,
            metavar="",
        ),
    ] = False,
) -> None:
    """Serve language models: every request its own adapter, images, draft and grammar."""
