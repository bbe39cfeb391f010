"""`plait doctor`: what this machine can do, what Plait will use of it, and what to change."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from plait.platform.cli.command import reporting


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON.", show_default=False)
    ] = False,
) -> None:
    """Probe this machine for a second or two: cores, memory, arithmetic, what is missing."""
    from plait.platform.machine import diagnosis
    from plait.platform.machine.cores import usable_cores
    from plait.platform.machine.instruction_set import check_instruction_set

    with reporting(debug=False):
        check_instruction_set()
    cores = usable_cores()
    probes = diagnosis.probe(cores)
    findings = diagnosis.examine(probes, cores)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_data(findings, probes), indent=2))
        return
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        typer.echo(f"{finding.subject:<{width}}  {finding.said}")
    advised = [finding for finding in findings if finding.advice]
    typer.echo("")
    for finding in advised:
        typer.echo(f"! {finding.subject}: {finding.advice}")
    if not advised:
        typer.echo("Nothing needs to change.")
