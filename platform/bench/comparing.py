"""Runs a comparison: finds engines, makes their weights, starts them, measures, reports."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.platform.bench import weights
from plait.platform.bench.comparison import Contender, load, measure, results
from plait.platform.bench.entries import MODULES, Entry, python_of, why_missing
from plait.platform.bench.machine import processor
from plait.platform.bench.throughput import Plan
from plait.platform.bench.worker_process import WorkerFailed, WorkerProcess
from plait.platform.bench.workload import Shape, random_token_prompts
from plait.platform.errors import ConfigError
from plait.platform.text.gguf_metadata import read_gguf_metadata
from plait.platform.text.tokenizer_files import read_tokenizer_files

_SPECIAL_TOKENS = 256  # ids below it are often no text


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What to compare, and where things lie."""

    source: Path  # a GGUF file, or a directory
    entries: tuple[Entry, ...]
    plan: Plan
    cores: tuple[int, ...]
    peers: Path  # folder of environments
    work: Path  # folder for weights and logs


def run(job: Comparison, tell: Callable[[str], None]) -> dict[str, Any]:
    """The report. What cannot be measured stands in it with the reason."""
    report: dict[str, Any] = {
        "bench": "compare",
        "model": job.source.name if job.source.is_dir() else job.source.stem.split(".")[0],
        "plan": dataclasses.asdict(job.plan),
        "machine": _machine(job.cores),
        "engines": {},
    }
    prompts = _prompts(job.source)
    with contextlib.ExitStack() as stack:
        probe = stack.enter_context(_worker(job, "probe", "own", "probe"))
        probe.ask("load", weights="", options={})
        contenders = []
        for entry in job.entries:
            reason = why_missing(entry, job.peers)
            report["engines"][entry.name] = facts = {"skipped": reason} if reason else {}
            if reason:
                tell(f"{entry.name}: left out, {reason}")
                continue
            contender = _start(job, entry, facts, stack, tell, prompts)
            if contender is not None:
                contenders.append(contender)
        if not contenders:
            raise ConfigError("no engine could be started: see the lines above", param="engine")
        report["rounds"] = []
        with _until_told_to_stop(report["rounds"], tell):
            for one in measure(
                job.plan, contenders, lambda s: probe.ask("probe", seconds=s), prompts, tell
            ):
                report["rounds"].append(one)
    report["results"] = results(report["rounds"])
    return report


@contextlib.contextmanager
def _until_told_to_stop(
    rounds: list[dict[str, Any]], tell: Callable[[str], None]
) -> Iterator[None]:
    """Ctrl-C ends the rounds, and those that are whole are reported."""
    try:
        yield
    except KeyboardInterrupt:
        if not rounds:
            raise
        tell(f"told to stop: {len(rounds)} rounds are reported")


def _start(
    job: Comparison,
    entry: Entry,
    facts: dict[str, Any],
    stack: contextlib.ExitStack,
    tell: Callable[[str], None],
    prompts: Callable[[Shape, int], list[list[int]]],
) -> Contender | None:
    try:
        path = weights.make(job.source, entry.weights, job.work)
    except ConfigError as error:
        facts["skipped"] = error.message
        tell(f"{entry.name}: left out, {error.message}")
        return None
    module = MODULES.get(entry.engine, entry.engine)
    worker = stack.enter_context(_worker(job, entry.name, entry.engine, module))
    contender = Contender(entry=entry, worker=worker, facts=facts)
    shape = Shape(batch_size=1, input_tokens=job.plan.input_tokens, output_tokens=1)
    try:
        load(contender, str(path), _options(job, entry), prompts(shape, -1)[0])
    except WorkerFailed as error:
        facts["failed"] = str(error)
        tell(f"{entry.name}: left out, {error}")
        worker.close()
        return None
    tell(f"{entry.name}: first token after {facts['first_token_s']:.1f} s")
    return contender


def _worker(job: Comparison, name: str, engine: str, module: str) -> WorkerProcess:
    job.work.mkdir(parents=True, exist_ok=True)
    python = python_of("plait" if engine == "own" else engine, job.peers)
    assert python is not None, "what is not installed is left out"
    return WorkerProcess(python, module, job.cores, job.work / f"{name}.log")


def _options(job: Comparison, entry: Entry) -> dict[str, Any]:
    """What the engine's worker takes: its entry's options, and sizes of the workload."""
    options = dict(entry.options) | {"num_threads": len(job.cores) or os.cpu_count() or 1}
    tokens = job.plan.input_tokens + job.plan.output_tokens
    sequences = max(job.plan.batch_sizes)
    if entry.is_own:
        # Drafts would be measured with it: answers to random tokens repeat themselves.
        sizes = {"max_model_len": max(tokens, 32), "max_num_seqs": sequences, "speculation": "off"}
        return options | sizes
    if entry.engine == "transformers":
        return options
    return options | {"tokens": tokens, "sequences": sequences}


def _prompts(source: Path) -> Callable[[Shape, int], list[list[int]]]:
    if source.is_dir():
        vocab_size = read_tokenizer_files(source).backend.get_vocab_size()
    else:
        vocab_size = len(read_gguf_metadata(source)["tokenizer.ggml.tokens"])
    avoid = range(min(_SPECIAL_TOKENS, vocab_size // 2))
    return lambda shape, seed: random_token_prompts(
        shape, vocab_size=vocab_size, avoid=avoid, seed=seed
    )


def _machine(cores: Sequence[int]) -> dict[str, Any]:
    import torch

    from plait.platform.ops._native import has_kernels

    return {
        "processor": processor(),
        "cpu_isa": torch.ops.plait.cpu_isa() if has_kernels() else "none: not built",
        "num_cores": os.cpu_count(),
        "cores": list(cores),
    }
