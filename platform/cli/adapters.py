"""`plait adapters`: what a running server has loaded, and how to change it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.platform.cli.adapters_inspect import inspect
from plait.platform.cli.asking_flags import ADMIN, Administering
from plait.platform.cli.command import EPILOG, with_flags
from plait.platform.cli.sources import Resolved
from plait.platform.cli.table import KNOWN
from plait.platform.cli.values import format_size
from plait.platform.errors import ConfigError, EngineDied

if TYPE_CHECKING:
    import httpx

app = typer.Typer(
    help="List, load, unload and inspect LoRA adapters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
_Name = Annotated[str, typer.Argument(help="The adapter's name.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="As JSON, reports included.")]


def list_adapters(*, as_json: _Json = False, flags: Resolved) -> None:
    """Show the adapters that a server has loaded."""
    adapters = _ask(flags, "GET", "/v1/lora_adapters")["data"]
    if as_json:
        typer.echo(json.dumps(adapters, indent=2))
        return
    if not adapters:
        typer.echo("no adapters are loaded")
    for each in adapters:
        pinned = ", pinned" if each["pinned"] else ""
        typer.echo(
            f"{each['name']:<24} {each['generation'][:12]}  {each['level']}{pinned}, "
            f"{format_size(each['device_bytes'] or each['num_bytes'])}"
            f"{' as ' if each['device_dtype'] else ''}{each['device_dtype']}, "
            f"{len(each['report']['sites'])} sites, {each['leases']} requests"
        )


def load(  # noqa: PLR0913 (each is an option)
    name: _Name,
    path: Annotated[
        str,
        typer.Argument(
            help="Folder, as the server sees it, below its --adapter-dir.", show_default=False
        ),
    ],
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the adapter of that name.")
    ] = False,
    expected_generation: Annotated[
        str | None,
        typer.Option(help="With --replace: only if this generation is loaded.", metavar="HEX"),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Keep it where it can run.")] = False,
    as_json: _Json = False,
    *,
    flags: Resolved,
) -> None:
    """Load an adapter into a running server, or replace one."""
    body = {
        "lora_name": name,
        "lora_path": path,
        "load_inplace": replace,
        "expected_generation": expected_generation,
        "pinned": pinned,
    }
    loaded = _ask(flags, "POST", "/v1/load_lora_adapter", body)
    if as_json:
        typer.echo(json.dumps(loaded, indent=2))
        return
    report = loaded["report"]
    typer.echo(f"{name} is loaded: generation {loaded['generation']}")
    typer.echo(f"{len(report['sites'])} sites, {format_size(loaded['num_bytes'])}")
    for warning in report["warnings"]:
        typer.echo(f"note: {warning}")


def unload(
    name: _Name,
    expected_generation: Annotated[
        str | None, typer.Option(help="Only if this generation is loaded.", metavar="HEX")
    ] = None,
    *,
    flags: Resolved,
) -> None:
    """Unload an adapter. Requests that use it go on to their ends."""
    body = {"lora_name": name, "expected_generation": expected_generation}
    gone = _ask(flags, "POST", "/v1/unload_lora_adapter", body)
    typer.echo(f"{name} is unloaded; {gone['leases']} requests still use it")


def _ask(flags: Resolved, method: str, path: str, body: object = None) -> dict[str, Any]:
    """The server's answer. Raises its error in its own words."""
    import httpx

    from plait.platform.cli.remote import error_of

    administering = flags.build(Administering)
    key = administering.api_key if method == "GET" else None
    key = key or administering.admin_key
    if method != "GET" and key is None:
        raise ConfigError("this needs --admin-key, the key that the server was started with")
    url = administering.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S) as client:
            reply = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise EngineDied(f"{url}: {type(error).__name__}: {error}") from None
    if reply.status_code != httpx.codes.OK:
        _show_unmatched(reply)
        raise error_of(reply.text, reply.status_code)
    answer: dict[str, Any] = reply.json()
    return answer


_TIMEOUT_S = 600.0  # a large adapter is copied and checked before the answer


def _show_unmatched(reply: httpx.Response) -> None:
    """The tensors that a refusal is about."""
    try:
        report = reply.json().get("report") or {}
    except ValueError:
        return
    for what in ("unmatched", "not_finite"):
        for tensor in report.get(what, ()):
            typer.echo(f"{what.replace('_', ' ')}: {tensor}", err=True)


for _function, _command in ((list_adapters, "list"), (load, "load"), (unload, "unload")):
    app.command(_command, epilog=EPILOG)(with_flags(ADMIN, KNOWN)(_function))
app.command("inspect")(inspect)
