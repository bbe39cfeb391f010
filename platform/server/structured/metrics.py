"""Metrics of grammars: compiles here, masks and forced tokens from the engine's `Stats`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from plait.platform.server.client import EngineClient
    from plait.platform.server.structured.grammars import Grammars
    from plait.structured.pool import PoolStats

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# The pool's counts by the label that they get: where a grammar came from, why a compile ended.
_HITS = {"hits_memory": "memory", "hits_disk": "disk", "hits_pending": "pending"}
_KILLED = {
    "killed_processor": "processor_time",
    "killed_time": "time",
    "killed_outside": "outside",
    "crashed": "memory_or_crash",
}


class GrammarMetrics:
    """A histogram of compiles, and what is read when metrics are scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._seconds = Histogram(
            "plait:grammar_compile_seconds",
            "Seconds of compiling a grammar; those that were not compiled have the backend none.",
            ["backend"],
            buckets=_BUCKETS,
            registry=registry,
        )

    def compiled(self, backend: str, seconds: float) -> None:
        """Count one compile; an empty backend means that it was refused. From any thread."""
        self._seconds.labels(backend or "none").observe(seconds)

    def collect_from(self, client: EngineClient, grammars: Grammars) -> None:
        """Read the pool and the engine with each scrape."""
        self._registry.register(_GrammarCollector(client, grammars))


class _GrammarCollector(Collector):
    def __init__(self, client: EngineClient, grammars: Grammars) -> None:
        self._client = client
        self._grammars = grammars

    def describe(self) -> list[Metric]:
        """Nothing: registering must not need an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Of the pool, where there is one, and of the engine."""
        pool = self._grammars.stats
        if pool is not None:
            yield from _pool(pool)
        stats = self._client.stats
        forced, accepted = stats.drafts.get("grammar", (0, 0))
        for name, text, value in (
            ("mask_rows", "Rows of logits that a grammar masked.", stats.mask_rows),
            ("mask_seconds", "Seconds of filling masks, beside the forward.", stats.mask_seconds),
            ("mask_wait_seconds", "Of these, what steps waited for.", stats.mask_wait_seconds),
            ("grammar_forced_tokens", "Tokens proposed as forced.", forced),
            ("grammar_forced_tokens_accepted", "Forced tokens that became output.", accepted),
            ("grammar_faults", "Answers that ended as a matcher broke down.", stats.grammar_faults),
        ):
            counter = CounterMetricFamily(f"plait:{name}", text)
            counter.add_metric((), value)
            yield counter


def _pool(stats: PoolStats) -> Iterator[Metric]:
    for name, text, value in (
        ("grammar_cache_bytes", "Bytes of compiled grammars kept.", stats.cache_bytes),
        ("grammar_pending", "Compiles that wait or run.", stats.num_pending),
    ):
        gauge = GaugeMetricFamily(f"plait:{name}", text)
        gauge.add_metric((), value)
        yield gauge
    yield _labelled(
        "grammar_cache_hits", "Grammars that were found compiled.", "level", _HITS, stats
    )
    yield _labelled("grammar_compile_killed", "Compiles that were ended.", "reason", _KILLED, stats)
    outcomes = {
        "compiled": "compiled",
        "refused": "refused",
        "hits_refused": "refused_before",
        "failed": "failed",
    }
    yield _labelled("grammar_compiles", "Compiles by outcome.", "outcome", outcomes, stats)


def _labelled(name: str, text: str, label: str, values: dict[str, str], stats: PoolStats) -> Metric:
    counter = CounterMetricFamily(f"plait:{name}", text, labels=(label,))
    for key, value in values.items():
        counter.add_metric((value,), stats.counts.get(key, 0))
    return counter
