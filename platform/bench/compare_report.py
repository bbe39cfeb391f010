"""A comparison as a page: tables and a plot, with the machine and the command."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Column, Table

from plait.platform.bench.comparison import ratio
from plait.platform.bench.entries import OWN
from plait.platform.bench.plot import Bar, Panel, bars_svg

_PLOT = "comparison.svg"
_CLOCKS = {
    "wall": "by the clock on the wall",
    "processor": "by processor time, as the machine had other work too",
}


def console_table(report: dict[str, Any]) -> Table:
    """Decode and prefill rates of every engine, by batch size."""
    sizes = [one["batch_size"] for one in report["results"]]
    table = Table(
        Column("engine", no_wrap=True),
        *(Column(f"dec.\n{size}", justify="right", no_wrap=True) for size in sizes),
        *(Column(f"pre.\n{size}", justify="right", no_wrap=True) for size in sizes),
        Column("first\ns", justify="right", no_wrap=True),
        caption="tokens per second of decode and prefill by batch size, medians, "
        f"{_CLOCKS[report['clock']]}; seconds to the first token",
    )
    for row in _rows(report):
        table.add_row(*row)
    return table


def page(report: dict[str, Any], command: str) -> str:
    """The whole as Markdown."""
    sizes = [one["batch_size"] for one in report["results"]]
    titles = ["engine and weights", *(f"decode {s}" for s in sizes)]
    titles += [*(f"prefill {s}" for s in sizes), "first token, s"]
    lines = [
        "# Engines compared",
        "",
        "Written by this command; change it by running it again:",
        "",
        f"    {command}",
        "",
        _how(report),
        "",
        f"![Bars of the tables' rates]({_PLOT})",
        "",
        *_markdown(titles, _rows(report)),
        "",
        "First token: seconds from starting the process to the first token of one prompt.",
        "",
        *_against_peers(report),
        "## The machine",
        "",
        _which(report["machine"]),
        "",
        *_probes(report),
        "## Versions",
        "",
        *_markdown(["engine and weights", "what ran"], _versions(report)),
        "",
    ]
    return "\n".join(lines)


def plot(report: dict[str, Any]) -> str:
    """Decode by batch size, and prefill of the largest batch, as SVG."""
    panels = [
        _panel(one, "decode_rate", report["clock"], f"decode tok/s, batch {one['batch_size']}")
        for one in report["results"]
    ]
    last = report["results"][-1]
    panels.append(
        _panel(last, "prefill_rate", report["clock"], f"prefill tok/s, batch {last['batch_size']}")
    )
    return bars_svg(f"{report['model']} on {report['machine']['processor']}", panels)


def best(one: dict[str, Any], rate: str, *, clock: str, own: bool) -> str | None:
    """The fastest of our lines, or of the others."""
    rates = {
        name: figures[clock][rate]
        for name, figures in one["engines"].items()
        if name.startswith(f"{OWN}-") is own
    }
    return max(rates, key=lambda name: rates[name]) if rates else None


def _how(report: dict[str, Any]) -> str:
    plan = report["plan"]
    return (
        f"{report['model']}, prompts of {plan['input_tokens']} random tokens, "
        f"{plan['output_tokens']} new tokens, greedy, end tokens ignored, no drafts. Each engine "
        f"in its own process on core {_list(report['machine']['cores'])}, in turns, "
        f"medians of {plan['repeats']} round{'s' * (plan['repeats'] > 1)}. Tokens per second "
        f"{_CLOCKS[report['clock']]}; decode is counted once every prompt is done, prefill "
        "until then."
    )


def _which(machine: dict[str, Any]) -> str:
    return (
        f"{machine['processor']}, kernels for {machine['cpu_isa']}; {machine['num_cores']} cores, "
        f"of which the engines had {_list(machine['cores'])}."
    )


def _panel(one: dict[str, Any], rate: str, clock: str, title: str) -> Panel:
    return Panel(
        title=title,
        bars=tuple(
            Bar(name=name, value=figures[clock][rate], strong=name.startswith(f"{OWN}-"))
            for name, figures in one["engines"].items()
        ),
    )


def _rows(report: dict[str, Any]) -> list[list[str]]:
    names = dict.fromkeys(name for one in report["results"] for name in one["engines"])
    rows = []
    for name in names:
        found = [one["engines"].get(name) for one in report["results"]]
        row = [name]
        for rate in ("decode_rate", "prefill_rate"):
            row += [
                "–" if figures is None else f"{figures[report['clock']][rate]:.0f}"
                for figures in found
            ]
        rows.append([*row, f"{report['engines'][name]['first_token_s']:.1f}"])
    return rows


def _against_peers(report: dict[str, Any]) -> list[str]:
    rows = []
    for one in report["results"]:
        for rate, title in (("decode_rate", "decode"), ("prefill_rate", "prefill")):
            ours, theirs = (
                best(one, rate, clock=report["clock"], own=own) for own in (True, False)
            )
            if ours and theirs:
                times = ratio(
                    report["rounds"], ours, theirs, (one["batch_size"], rate, report["clock"])
                )
                rows.append([f"{title}, batch {one['batch_size']}", ours, theirs, f"{times:.2f}"])
    if not rows:
        return []
    titles = ["", "our fastest", "the fastest of the others", "times as fast"]
    note = "The last column is the median over rounds of the ratio inside one round."
    return ["## Ratios", "", *_markdown(titles, rows), "", note, ""]


def _probes(report: dict[str, Any]) -> list[str]:
    """What the machine gave before each round: the medians of its tries, lowest to highest."""

    def spread(values: Sequence[float]) -> str:
        return f"{min(values):.1f} to {max(values):.1f}"

    probes = [one["probe"] for one in report["rounds"]]
    rows = [["memory read, GB/s", spread([p["read_gb_per_s"]["median"] for p in probes])]]
    rows += [
        [f"{kind} products, GOP/s", spread([p["gop_per_s"][kind]["median"] for p in probes])]
        for kind in probes[0]["gop_per_s"]
    ]
    loads = [one["load_average"] for one in report["rounds"] if one["load_average"] is not None]
    if loads:
        rows.append(["load average", spread(loads)])
    return [*_markdown(["probed before each round", "lowest to highest"], rows), ""]


def _versions(report: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, facts in report["engines"].items():
        said = ", ".join(f"{key} {value}" for key, value in facts.get("versions", {}).items())
        wrong = facts.get("skipped") or facts.get("failed")
        rows.append([name, f"not measured: {wrong}" if wrong else said])
    return rows


def _markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    return [line(titles), line(["---"] * len(titles)), *map(line, rows)]


def _list(cores: Sequence[int] | None) -> str:
    return ", ".join(map(str, cores)) if cores else "any"
