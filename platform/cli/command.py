"""Turns a function over resolved settings into a command.

Its options come from the flag table, its errors end in one clear line and an exit code.

Exit codes: 0 done; 1 what was asked for failed; 2 a flag, variable or file is wrong;
130 interrupted.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from plait.platform.cli.flags import Flag
from plait.platform.cli.settings import set_environment
from plait.platform.cli.sources import resolve
from plait.platform.cli.values import ADAPTER, BOOL, SIZE, format_size
from plait.platform.errors import ConfigError, PlaitError

FAILED = 1
WRONG_USAGE = 2
TERMINATED = 143
INTERRUPTED = 130

EPILOG = (
    "Each flag can also be set by an environment variable (--max-model-len: PLAIT_MAX_MODEL_LEN) "
    "or a line of the --config file (max-model-len: 4096). A flag goes before a variable, a "
    "variable before the file."
)


# An adapter's name with where it lies, or its JSON form.
_ADAPTER = re.compile(r"[\w.-]+=.+|\s*\{.*", re.DOTALL)


class OneAdapterEach(TyperCommand):
    """A command that says so where several adapters follow one flag, as other servers take them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click. What follows would be taken for the model, or for nothing."""
        for param in self.params:
            if param.metavar != ADAPTER.name.upper():
                continue
            for flag, first, second in zip(args, args[1:], args[2:], strict=False):
                if flag in param.opts and _ADAPTER.fullmatch(second):
                    ctx.fail(f"{flag} takes one adapter: repeat it, {flag} {first} {flag} {second}")
        return super().parse_args(ctx, args)


def with_flags(
    flags: tuple[Flag, ...], known: tuple[Flag, ...]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function whose parameter `flags` takes a `Resolved` the options of the table.

    Its other parameters are typer's as usual. `--config` and `--debug` are added.
    """

    def wrap(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in signature.parameters.values()
            if p.name != "flags"
        ]

        @functools.wraps(function)
        def command(*, config: str | None, debug: bool, **given: Any) -> None:
            rest = {p.name: given.pop(p.name) for p in own}
            with reporting(debug=debug):
                resolved = resolve(
                    flags,
                    known,
                    given=_join_negations(flags, given),
                    environ=os.environ,
                    file=Path(config) if config else None,
                )
                set_environment(resolved)
                function(flags=resolved, **rest)

        parameters = [*own, *(p for flag in flags for p in _parameters(flag)), *_COMMON]
        parameters.sort(key=lambda p: not _is_argument(p))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return wrap


@contextmanager
def reporting(*, debug: bool) -> Iterator[None]:
    """End the command with one line on stderr and an exit code where it fails."""
    try:
        yield
    except ConfigError as error:
        _last_line(error.message, debug)
        raise typer.Exit(WRONG_USAGE) from None
    except PlaitError as error:
        _last_line(error.message, debug)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read our output has enough; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:  # noqa: BLE001 (the border to the user)
        hint = "" if debug else " This is a fault of plait: run again with --debug for the trace."
        _last_line(f"{type(error).__name__}: {error}.{hint}", debug)
        raise typer.Exit(FAILED) from None


def _last_line(message: str, debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exc()
    typer.echo("plait: " + " ".join(message.split()), err=True)


def _parameters(flag: Flag) -> list[inspect.Parameter]:
    """A flag's options. A boolean has two; help shows the one that changes the default."""
    panel = flag.panel
    text = f"{flag.help}{_default_text(flag)}"
    if flag.argument:
        info: Any = typer.Argument(help=text, metavar=flag.spelling.upper(), show_default=False)
        return [_optional(flag.key, str, info)]
    if flag.value_kind is BOOL:
        return [
            _optional(
                prefix.replace("-", "_") + flag.key,
                bool,
                typer.Option(
                    f"--{prefix}{flag.spelling}",
                    help=flag.help,
                    hidden=flag.default is sets,
                    show_default=False,
                    rich_help_panel=panel,
                    metavar="",
                ),
            )
            for prefix, sets in (("", True), ("no-", False))
        ]
    names = [f"--{name}" for name in (flag.spelling, *flag.aliases)]
    names += [flag.short] if flag.short else []
    info = typer.Option(
        *names, help=text, metavar=_metavar(flag), show_default=False, rich_help_panel=panel
    )
    return [_optional(flag.key, list[str] if flag.is_list else str, info)]


def _optional(name: str, kind: Any, info: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, info]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _join_negations(flags: tuple[Flag, ...], given: dict[str, Any]) -> dict[str, Any]:
    """What typer collected, with `no_x=True` as `x=False`."""
    for flag in flags:
        negated = given.pop(f"no_{flag.key}", None)
        if negated and given.get(flag.key):
            raise ConfigError(f"--{flag.spelling} and --no-{flag.spelling}: keep one")
        if negated:
            given[flag.key] = False
    return given


def _metavar(flag: Flag) -> str:
    if flag.metavar or flag.choices:
        return flag.metavar or "|".join(flag.choices)
    return {"whole number": "N", "number": "X", "size": "SIZE"}.get(flag.value_kind.name, "TEXT")


def _default_text(flag: Flag) -> str:
    """The default as help shows it; nothing where the default is "choose what fits"."""
    if flag.default is None or flag.default in ((), ""):
        return ""
    shown = format_size(flag.default) if flag.value_kind is SIZE else f"{flag.default}"
    return f" Default: {shown}."


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(
        type(meta).__name__ == "ArgumentInfo"
        for meta in getattr(parameter.annotation, "__metadata__", ())
    )


_COMMON = (
    inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            str | None,
            typer.Option(
                "--config", metavar="FILE", help="YAML file of settings.", show_default=False
            ),
        ],
    ),
    inspect.Parameter(
        "debug",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool,
            typer.Option("--debug", help="Show the whole trace of an error.", show_default=False),
        ],
    ),
)
