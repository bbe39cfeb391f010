"""Adapters as metrics: who uses which, where they lie, what they take.

A label costs memory for ever, so at most `MAX_LABELS` adapters have series of their own; the rest
counts as "other". A series ends when its adapter is unloaded, and outlives idleness.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.adapters.info import AdapterState
from plait.platform.server.responses import SpeculationDetails

if TYPE_CHECKING:
    from plait.adapters.registry import AdapterRegistry, Named
    from plait.platform.messages import Stats
    from plait.platform.server.access import Access
    from plait.platform.server.client import EngineClient
    from plait.platform.server.responses import Usage

MAX_LABELS = 256
OTHER = "other"


@dataclass(slots=True)
class Tally:
    """What one adapter was used for."""

    num_requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_running: int = 0  # requests that have not ended
    drafts: dict[str, list[int]] = field(default_factory=dict)  # source → [verified, output]


class AdapterUsage:
    """Counts requests by the adapters that they name."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry
        self._tallies: dict[str, Tally] = {}

    def started(self, names: Iterable[str], num_requests: int) -> None:
        """So many engine requests begin."""
        for name in names:
            tally = self._tally(name)
            tally.num_requests += num_requests
            tally.num_running += num_requests

    def ended(self, names: Iterable[str], num_requests: int, usage: Usage) -> None:
        """They have ended, with so many tokens in all."""
        speculation = usage.completion_tokens_details.speculation
        for name in names:
            tally = self._tally(name)
            tally.num_running = max(0, tally.num_running - num_requests)
            tally.prompt_tokens += usage.prompt_tokens
            tally.generation_tokens += usage.completion_tokens
            if isinstance(speculation, SpeculationDetails):
                for source, counts in speculation.by_source.items():
                    sums = tally.drafts.setdefault(source, [0, 0])
                    sums[0] += counts.drafted
                    sums[1] += counts.accepted

    def tallies(self) -> dict[str, Tally]:
        """By label; those of adapters that are gone have ended."""
        gone = [n for n in self._tallies if n != OTHER and n not in self._registry]
        for name in gone:
            del self._tallies[name]
        return self._tallies

    def _tally(self, name: str) -> Tally:
        known = self._tallies.get(name)
        if known is not None:
            return known
        if name not in self._registry or len(self.tallies()) >= MAX_LABELS:
            name = OTHER
        return self._tallies.setdefault(name, Tally())


class AdapterCollector(Collector):
    """Gauges and counters of the adapters, read when they are scraped."""

    def __init__(
        self, client: EngineClient, registry: AdapterRegistry, usage: AdapterUsage
    ) -> None:
        self._client = client
        self._registry = registry
        self._usage = usage

    def describe(self) -> list[Metric]:
        """Nothing: registering must not need an engine that is ready."""
        return []

    def collect(self) -> Iterator[Metric]:
        """How things stand."""
        entries = self._registry.entries()[:MAX_LABELS]
        tallies = self._usage.tallies()
        states = [(named, self._client.adapter_states.get(named.generation)) for named in entries]
        yield self._active(states, tallies)
        yield from _by_adapter(states, self._registry)
        yield from _used(tallies)
        yield from _engine(self._client.stats)

    def _active(
        self, states: list[tuple[Named, AdapterState | None]], tallies: dict[str, Tally]
    ) -> Metric:
        """What runs and what waits, as vLLM tells it to routers; not what is loaded."""
        in_use = [
            (named.name, state)
            for named, state in states
            if state is not None and named.name in tallies and tallies[named.name].num_running
        ]
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests, as labels; the value is the time.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        running = ",".join(name for name, state in in_use if state.leases)
        waiting = ",".join(name for name, state in in_use if state.waiting)
        info.add_metric((str(self._registry.max_names), running, waiting), time.time())
        return info


class LimitedRegistry(Collector):
    """A registry without what names adapters that the caller may not use."""

    def __init__(self, registry: Collector, access: Access) -> None:
        self._registry = registry
        self._access = access

    def collect(self) -> Iterator[Metric]:
        """The registry's families, each with the samples that are left."""
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={k: self._shown(k, v) for k, v in sample.labels.items()})
                for sample in family.samples
                if self._may_use(sample.labels.get("adapter", OTHER))
            ]
            yield family

    def _may_use(self, adapter: str) -> bool:
        return adapter == OTHER or self._access.may_use(adapter)

    def _shown(self, label: str, value: str) -> str:
        if not label.endswith("_lora_adapters"):
            return value
        return ",".join(filter(self._may_use, value.split(",")))


def _by_adapter(
    states: list[tuple[Named, AdapterState | None]], registry: AdapterRegistry
) -> Iterator[Metric]:
    resident = GaugeMetricFamily(
        "plait:adapter_resident", "1 where an adapter lies.", labels=("adapter", "level")
    )
    num_bytes = GaugeMetricFamily(
        "plait:adapter_bytes", "Memory that an adapter takes on the device.", labels=("adapter",)
    )
    leases = GaugeMetricFamily(
        "plait:adapter_leases", "Requests that hold an adapter's generation.", labels=("adapter",)
    )
    info = GaugeMetricFamily(
        "plait:adapter_info",
        "The generation that a name points to, as a label.",
        labels=("adapter", "generation", "pinned", "dtype"),
    )
    for named, state in states:
        if state is not None:
            resident.add_metric((named.name, state.level), 1)
        num_bytes.add_metric((named.name,), named.info.device_bytes)
        leases.add_metric((named.name,), registry.num_leases(named.generation))
        pinned, dtype = str(named.pinned).lower(), named.info.device_dtype
        info.add_metric((named.name, named.generation, pinned, dtype), 1)
    yield from (resident, num_bytes, leases, info)


def _used(tallies: dict[str, Tally]) -> Iterator[Metric]:
    for attribute, name, text in (
        ("num_requests", "plait:adapter_requests", "Requests by adapter."),
        ("prompt_tokens", "plait:adapter_prompt_tokens", "Prompt tokens by adapter."),
        ("generation_tokens", "plait:adapter_generation_tokens", "Generated tokens by adapter."),
    ):
        counter = CounterMetricFamily(name, text, labels=("adapter",))
        for adapter, tally in tallies.items():
            counter.add_metric((adapter,), getattr(tally, attribute))
        yield counter
    drafts = CounterMetricFamily(
        "plait:adapter_draft_tokens",
        "Drafts verified by adapter, of requests that have ended.",
        labels=("adapter", "source", "outcome"),
    )
    for adapter, tally in tallies.items():
        for source, (num_verified, num_output) in sorted(tally.drafts.items()):
            drafts.add_metric((adapter, source, "accepted"), num_output)
            drafts.add_metric((adapter, source, "rejected"), num_verified - num_output)
    yield drafts


def _engine(stats: Stats) -> Iterator[Metric]:
    for name, text, value in (
        ("plait:adapter_host_bytes", "Host memory that adapters take.", stats.adapter_host_bytes),
        (
            "plait:adapter_device_bytes",
            "Device memory that adapters take.",
            stats.adapter_device_bytes,
        ),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    for name, text, value in (
        ("plait:adapter_rows", "Token rows that an adapter changed.", stats.adapter_rows),
        ("plait:adapter_evictions", "Evictions from the device.", stats.adapter_evictions),
    ):
        yield CounterMetricFamily(name, text, value=value)
    loads = CounterMetricFamily("plait:adapter_loads", "Loads, by phase.", labels=("phase",))
    seconds = CounterMetricFamily(
        "plait:adapter_load_seconds", "Seconds spent loading, by phase.", labels=("phase",)
    )
    for phase, count, spent_s in (
        ("read", stats.adapter_loads, stats.adapter_load_seconds),
        ("place", stats.adapter_placements, stats.adapter_placement_seconds),
    ):
        loads.add_metric((phase,), count)
        seconds.add_metric((phase,), spent_s)
    yield from (loads, seconds)
