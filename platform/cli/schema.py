"""`plait schema check FILE`: what a server would say of a schema, and who enforces each keyword."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.platform.cli.command import FAILED, reporting
from plait.platform.cli.values import piped
from plait.platform.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    from plait.structured.router import Finding, Route
    from plait.structured.spec import GrammarSpec

app = typer.Typer(
    help="Look at JSON schemas for structured output.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def schema() -> None:
    """Look at JSON schemas for structured output."""


@app.command()
def check(  # noqa: PLR0913 (its options)
    file: Annotated[str, typer.Argument(help="The schema's file; - reads standard input.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", show_default=False, metavar="")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="As with 'strict': true.", show_default=False, metavar=""),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Whose tokens to compile it for: a directory or hub id. By default the embedded.",
            show_default=False,
            metavar="MODEL",
        ),
    ] = None,
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile it too, as a server would, in a second or two.",
            show_default=False,
            metavar="",
        ),
    ] = True,
    any_form: Annotated[
        bool | None,
        typer.Option(
            "--any-form/--one-form",
            help="Keys in any order and 1.0 for 1, or not. By default as '$schema' has it.",
            show_default=False,
            metavar="",
        ),
    ] = None,
    assert_formats: Annotated[
        bool | None,
        typer.Option(
            "--assert-formats/--annotate-formats",
            help="Hold to 'format', or not. By default as '$schema' has it.",
            show_default=False,
            metavar="",
        ),
    ] = None,
) -> None:
    """Say which backend enforces each keyword of a JSON schema, what is refused, and compile it.

    Exit code 0: a server takes it; 1: it is refused.
    """
    with reporting(debug=False):
        content = _read(file)
        from plait.structured.router import explain, route
        from plait.structured.spec import GrammarKind, GrammarSpec

        spec = GrammarSpec(
            kind=GrammarKind.JSON_SCHEMA,
            content=content,
            param="schema",
            strict=strict,
            options={"any_form": any_form, "assert_formats": assert_formats},
        )
        findings = explain(spec)
        start = time.perf_counter()
        chosen, error = _route(spec, route)
        seconds = time.perf_counter() - start
        data = _as_data(findings, chosen, error, seconds)
        if compiles and not error:
            from plait.platform.cli.schema_compile import compiled

            data["compiled"] = compiled(spec, model)
            data["error"] = error = data["compiled"].pop("error")
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False) if as_json else _as_text(data))
    if error:
        raise typer.Exit(FAILED)


def _read(file: str) -> Any:
    try:
        text = piped(lambda stdin: stdin.read()) if file == "-" else Path(file).read_text("utf-8")
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice in one object")
        found[key] = value
    return found


def _route(spec: GrammarSpec, route: Any) -> tuple[Route | None, str]:
    try:
        return route(spec), ""
    except BadRequest as error:
        return None, error.message


def _as_data(
    findings: list[Finding], chosen: Route | None, error: str, seconds: float
) -> dict[str, Any]:
    return {
        "backend": chosen.backend if chosen else None,
        "error": error or None,
        "seconds": round(seconds, 6),
        "any_form": chosen is not None and chosen.any_form,
        "notes": list(chosen.notes) if chosen else [],
        "compiled": None,
        "keywords": [
            {
                "pointer": f.pointer,
                "keyword": f.keyword,
                "asserts": f.asserts,
                "backend": f.backend,
                "why": f.why or None,
            }
            for f in findings
        ],
    }


def _as_text(data: dict[str, Any]) -> str:
    lines = [
        f"{_held_by(each):<12} {each['pointer']}" + (f"  ({each['why']})" if each["why"] else "")
        for each in data["keywords"]
    ]
    lines += [f"note         {note}" for note in data["notes"]]
    if data["error"]:
        return "\n".join([*lines, f"refused: {data['error']}"])
    milliseconds = data["seconds"] * 1e3
    forms = ", in any form" if data["any_form"] else ""
    last = f"enforced by {data['backend']}{forms}; routed in {milliseconds:.1f} ms"
    if (made := data["compiled"]) is not None:
        last += f", compiled in {made['seconds'] * 1e3:.1f} ms"
    return "\n".join([*lines, last])


def _held_by(keyword: dict[str, Any]) -> str:
    if not keyword["asserts"]:
        return "nothing"
    return str(keyword["backend"] or "refused")
