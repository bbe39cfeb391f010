"""The `plait` command. Nothing heavy is imported here: help must be there at once."""

from __future__ import annotations

import typer

from plait.platform.cli import (
    adapters,
    bench,
    chat,
    check,
    complete,
    demo,
    doctor,
    schema,
    serve,
    table,
    version,
)
from plait.platform.cli.command import EPILOG, OneAdapterEach, with_flags

app = typer.Typer(
    name="plait",
    help="Serve language models: every request its own adapter, images, draft and grammar.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(cls=OneAdapterEach, epilog=EPILOG)(with_flags(table.SERVE, table.KNOWN)(serve.serve))
app.command(epilog=EPILOG)(with_flags(table.CHAT, table.KNOWN)(chat.chat))
app.command(epilog=EPILOG)(with_flags(table.COMPLETE, table.KNOWN)(complete.complete))
app.command(epilog=EPILOG)(with_flags(table.TOUR, table.KNOWN)(demo.demo))
app.command(epilog=EPILOG)(with_flags(table.CHECK, table.KNOWN)(check.check))
app.add_typer(bench.app, name="bench")
app.add_typer(schema.app, name="schema")
app.add_typer(adapters.app, name="adapters")
app.command()(doctor.doctor)
app.command()(version.version)
