"""`plait bench`: throughput and latency in this process, load on a server over HTTP."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from plait.platform.cli import bench_compare, table
from plait.platform.cli.bench_flags import (
    PEERS,
    Batches,
    Filling,
    Load,
    Measuring,
    Mixing,
    Picturing,
)
from plait.platform.cli.command import EPILOG, with_flags
from plait.platform.cli.engine_flags import MODEL
from plait.platform.cli.settings import engine_options
from plait.platform.cli.sources import Resolved
from plait.platform.errors import ConfigError, EngineDied

if TYPE_CHECKING:
    from rich.table import Table

    from plait.platform.bench.explain import Stage
    from plait.platform.bench.load import Target
    from plait.platform.bench.local import LocalEngine
    from plait.platform.config import Options

app = typer.Typer(
    help="Measure throughput and latency in this process, or a load on a server.",
    no_args_is_help=True,
    add_completion=False,
)

_TASK_AND_IMAGE = 1024  # tokens of a chat around its text

app.command(epilog=EPILOG)(with_flags(table.COMPARE, table.KNOWN)(bench_compare.compare))
app.command(epilog=EPILOG)(with_flags(PEERS, table.KNOWN)(bench_compare.peers))


@app.command(epilog=EPILOG)
@with_flags(table.THROUGHPUT, table.KNOWN)
def throughput(*, flags: Resolved) -> None:
    """Tokens per second of MODEL in this process, by batch size."""
    measuring, batches = flags.build(Measuring), flags.build(Batches)
    more = 0
    if batches.compare_speculation:  # what is to be copied is a whole answer, with a task around it
        more = max(measuring.output_len - measuring.input_len, 0) + 160
    options = _options(flags, measuring, max(batches.batch_sizes), num_more=more)
    if batches.compare_speculation:
        _check_speculation(flags, batches)
    # Runs on one core can be compared; more cores bring the host's moods in.
    engine = _local_engine(flags, options, one_core=batches.compares)
    from plait.platform.bench.report import throughput_table
    from plait.platform.bench.throughput import Plan, measure

    plan = Plan(
        batch_sizes=batches.batch_sizes,
        input_tokens=measuring.input_len,
        output_tokens=measuring.output_len,
        repeats=measuring.repeats,
        warm_up=measuring.warm_up,
        seed=measuring.bench_seed,
    )
    report = {"bench": "throughput"} | engine.facts() | {"plan": dataclasses.asdict(plan)}
    if batches.compare_speculation:
        from plait.platform.bench import speculation

        results = speculation.measure(plan, engine.workloads(measuring.prompt_file), _tell)
        _finish(measuring, report | {"results": results}, speculation.table(results))
        return
    runners: list[Any] = [engine.runner]
    if batches.random_adapters:
        runners.append(engine.with_adapters(batches.random_adapters, batches.adapter_rank))
    prompts = engine.prompts(measuring.prompt_file)
    results = measure(plan, runners, prompts, _tell)
    report |= {"results": results}
    tables = [throughput_table(results)]
    if batches.explain:
        tables += _explain(engine.explain(plan, prompts, _tell), report)
    _finish(measuring, report, *tables)


@app.command(epilog=EPILOG)
@with_flags(table.BENCH, table.KNOWN)
def latency(*, flags: Resolved) -> None:
    """Time to first token and between tokens of MODEL, one request at a time."""
    measuring = flags.build(Measuring)
    engine = _local_engine(flags, _options(flags, measuring, 1))
    from plait.platform.bench.latency import measure
    from plait.platform.bench.report import latency_table
    from plait.platform.bench.workload import Shape

    make = engine.prompts(measuring.prompt_file)
    shape = Shape(
        batch_size=1, input_tokens=measuring.input_len, output_tokens=measuring.output_len
    )
    prompts = [make(shape, measuring.bench_seed + i)[0] for i in range(measuring.repeats)]
    result = measure(
        engine.runner, prompts, measuring.output_len, warm_up=measuring.warm_up, tell=_tell
    )
    report = {"bench": "latency"} | engine.facts() | {"results": result}
    _finish(measuring, report, latency_table([(engine.name, result)]))
    typer.echo(
        f"{result['tokens_per_s']['p50']:.1f} tok/s after the first token (median)", err=True
    )


@app.command(epilog=EPILOG)
@with_flags(table.BENCH_MIXED, table.KNOWN)
def mixed(*, flags: Resolved) -> None:
    """Requests with adapters, images, schemas and drafts at once, beside as many plain ones."""
    measuring, mixing = flags.build(Measuring), flags.build(Mixing)
    longest = 2 * max(measuring.input_len, measuring.output_len) + _TASK_AND_IMAGE
    options = _options(flags, measuring, mixing.num_requests, num_more=longest)
    _pin(flags, options)
    from plait.platform.bench import machine
    from plait.platform.bench import mixing as bench
    from plait.platform.demo.default import with_default, with_default_draft
    from plait.platform.start import start_engine

    mix = bench.Mix(
        num_requests=mixing.num_requests,
        num_adapters=mixing.random_adapters,
        adapter_rank=mixing.adapter_rank,
        input_tokens=measuring.input_len,
        output_tokens=measuring.output_len,
    )
    mixer = bench.Mixer(start_engine(with_default(with_default_draft(options))), mix)
    try:
        result = mixer.measure(
            measuring.repeats, measuring.bench_seed, _tell, warm_up=measuring.warm_up
        )
    finally:
        mixer.close()
    report = {"bench": "mixed", "machine": machine.facts(), "mix": dataclasses.asdict(mix)}
    _finish(measuring, report | {"results": result}, bench.table(result))


@app.command(epilog=EPILOG)
@with_flags(table.BENCH_IMAGES, table.KNOWN)
def images(*, flags: Resolved) -> None:
    """Milliseconds that preparing and encoding an image of MODEL take, in one thread."""
    from plait.platform.bench import images as bench
    from plait.platform.bench import machine
    from plait.platform.demo.default import with_default

    measuring = flags.build(Measuring)
    if cores := measuring.cores or machine.first_core():
        machine.pin_to_cores(cores)
    sizes = [bench.parse_size(text) for text in flags.build(Picturing).image_sizes or bench.SIZES]
    options = with_default(engine_options(flags))
    results = list(bench.measure(options, sizes, measuring.repeats))
    report = {"bench": "images", "machine": machine.facts(), "results": results}
    _finish(measuring, report, bench.table(results))


@app.command(epilog=EPILOG)
@with_flags(table.BANDWIDTH, table.KNOWN)
def bandwidth(*, flags: Resolved) -> None:
    """The share of the memory's rate that decoding reaches, by a random model of any size."""
    from plait.platform.bench.machine import first_core, pin_to_cores

    measuring = flags.build(Measuring)
    longest = measuring.input_len + measuring.output_len
    options = engine_options(
        flags, max_num_seqs=1, max_model_len=max(longest, 32), speculation="off"
    )
    if not options.num_threads or flags.given("cores"):
        pin_to_cores(flags["cores"] or first_core())
    from plait.platform.bench.bandwidth import measure, random_engine
    from plait.platform.bench.throughput import Plan

    engine = random_engine(options, flags.build(Filling).model_bytes)
    plan = Plan(
        batch_sizes=(1,),
        input_tokens=measuring.input_len,
        output_tokens=measuring.output_len,
        repeats=measuring.repeats,
        warm_up=measuring.warm_up,
        seed=measuring.bench_seed,
    )
    result, tables = measure(engine, plan, _tell)
    _finish(measuring, {"bench": "bandwidth"} | engine.facts() | {"results": result}, *tables)


@app.command(epilog=EPILOG)
@with_flags(table.STARTUP, table.KNOWN)
def startup(*, flags: Resolved) -> None:
    """Seconds from the command to MODEL's first token, each time in a new process."""
    from plait.platform.bench import machine
    from plait.platform.bench.report import write_json
    from plait.platform.bench.startup import measure

    measuring = flags.build(Measuring)
    result = measure(_as_arguments(flags), measuring.repeats, _tell)
    if measuring.json:
        report = {"bench": "startup", "machine": machine.facts(), "results": result}
        write_json(report, measuring.json)
    if measuring.json != "-":
        typer.echo(f"first token after {result['median_s']:.2f} s (median)")


def _as_arguments(flags: Resolved) -> list[str]:
    """The model's flags as they were given, for another command."""
    arguments: list[str] = []
    for flag in MODEL:
        if not flags.given(flag.key) or flag.field == "progress":
            continue
        value, name = flags[flag.key], f"--{flag.spelling}"
        if isinstance(value, bool):
            arguments.append(name if value else f"--no-{flag.spelling}")
        else:
            arguments += [name, str(value)]
    return arguments


@app.command(epilog=EPILOG)
@with_flags(table.BENCH_SERVE, table.KNOWN)
def serve(*, flags: Resolved) -> None:
    """Latency, throughput and errors of a server under load; with --compare, of two."""
    from plait.platform.bench.load import Pace
    from plait.platform.bench.report import latency_table
    from plait.platform.bench.serving import compare, measure, parse_goals, report

    load, measuring = flags.build(Load), flags.build(Measuring)
    goals = parse_goals(load.goodput)
    pace = Pace(
        concurrency=load.concurrency or (None if load.request_rate else 8),
        rate_per_s=load.request_rate,
        seed=measuring.bench_seed,
    )
    targets = _targets(load, measuring)
    rounds = measure(targets, _texts(load, measuring), pace, warm_up=measuring.warm_up)
    results = [
        {"url": target.url, "model": target.model} | report(own, goals)
        for target, own in zip(targets, rounds, strict=True)
    ]
    whole: dict[str, Any] = {"bench": "serve", "load": dataclasses.asdict(load) | {"api_key": None}}
    whole |= {"plan": dataclasses.asdict(measuring), "results": results}
    if len(targets) == 2:
        whole["ratios"] = compare(*rounds)
    _finish(measuring, whole, latency_table([(result["url"], result) for result in results]))
    _say_results(results, whole.get("ratios"))
    if any(result["requests"] == result["errors"] for result in results):
        raise EngineDied("every request to a server failed: see the messages above")


def _check_speculation(flags: Resolved, batches: Batches) -> None:
    if batches.random_adapters:
        raise ConfigError(
            "--compare-speculation measures one thing alone: drop --random-adapters",
            param="compare-speculation",
        )
    if flags["speculation"] == "off":
        raise ConfigError(
            f"{flags.origin('speculation')} off leaves nothing for --compare-speculation to "
            "compare: drop one",
            param="compare-speculation",
        )


def _options(
    flags: Resolved, measuring: Measuring, batch_size: int, *, num_more: int = 0
) -> Options:
    """Options with room for the workload, where the user left them open."""
    extra: dict[str, Any] = {}
    if not flags.given("max_num_seqs"):
        extra["max_num_seqs"] = batch_size
    if not flags.given("max_model_len") and measuring.prompt_file is None:
        shortest = 2 * flags["block_size"]  # that an engine takes
        longest = measuring.input_len + measuring.output_len + num_more
        extra["max_model_len"] = max(longest, shortest)
    if measuring.prompt_file is not None and flags.given("input_len"):
        raise ConfigError("--prompt-file decides the prompts' lengths: drop --input-len")
    return engine_options(flags, **extra)


def _local_engine(flags: Resolved, options: Options, *, one_core: bool = False) -> LocalEngine:
    """Pin first: torch reads the cores when it is imported.

    `one_core` is the choice where the user made none.
    """
    _pin(flags, options, one_core=one_core)
    from plait.platform.bench.local import LocalEngine

    return LocalEngine(options)


def _pin(flags: Resolved, options: Options, *, one_core: bool = False) -> None:
    """See `_local_engine`."""
    from plait.platform.bench.machine import first_core, pin_to_cores

    cores = flags["cores"]
    if one_core and not flags.given("cores") and options.num_threads is None:
        cores = first_core()
    if cores:
        pin_to_cores(cores)


def _targets(load: Load, measuring: Measuring) -> list[Target]:
    from plait.platform.bench.load import Target, first_model

    if load.compare_model and not load.compare:
        raise ConfigError("--compare-model names a model of the --compare server, which is missing")
    asked = [(load.url, load.model)]
    if load.compare:
        asked.append((load.compare, load.compare_model))
    urls = [(url.rstrip("/").removesuffix("/v1"), model) for url, model in asked]
    return [
        Target(
            url=url,
            model=model or first_model(url, load.api_key),
            api_key=load.api_key,
            chat=load.chat,
            output_tokens=measuring.output_len,
        )
        for url, model in urls
    ]


def _texts(load: Load, measuring: Measuring) -> list[list[str]]:
    from pathlib import Path

    from plait.platform.bench.workload import random_texts, texts_of_file

    if measuring.prompt_file is not None:
        texts = texts_of_file(Path(measuring.prompt_file), load.num_requests)
        return [texts] * measuring.repeats
    return [
        random_texts(load.num_requests, measuring.input_len, seed=measuring.bench_seed + repeat)
        for repeat in range(measuring.repeats)
    ]


def _say_results(results: list[dict[str, Any]], ratios: dict[str, float] | None) -> None:
    for result in results:
        good = f", goodput {result['goodput_per_s']:.2f} req/s" if "goodput_per_s" in result else ""
        typer.echo(
            f"{result['url']}: {result['output_tokens_per_s']:.1f} output tok/s, "
            f"{result['requests_per_s']:.2f} req/s{good}, "
            f"{result['errors']} of {result['requests']} failed",
            err=True,
        )
        for message, count in result["error_messages"].items():
            typer.echo(f"  {count} × {message}", err=True)
    for name, value in (ratios or {}).items():
        typer.echo(f"× {name}: {value:.2f} (above 1: the first server is better)", err=True)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _explain(
    found: list[tuple[int, dict[str, Stage], dict[str, Any]]], report: dict[str, Any]
) -> list[Table]:
    """Add to the report; the tables to show."""
    from plait.platform.bench.explain import table as shown

    report["explained"] = [
        {"batch_size": size, "probe": probe}
        | {name: stage.as_dict() for name, stage in stages.items()}
        for size, stages, probe in found
    ]
    return [shown(size, stages, probe) for size, stages, probe in found]


def _finish(measuring: Measuring, report: dict[str, Any], *tables: Table) -> None:
    from plait.platform.bench.report import show, write_json

    for shown in tables:
        show(shown, to_stderr=measuring.json == "-")
    if measuring.json:
        write_json(report, measuring.json)
