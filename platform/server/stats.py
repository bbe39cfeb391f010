"""The engine's `Stats` as metrics, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.platform.errors import Overloaded
from plait.platform.row_counts import STRANDS
from plait.platform.server.draft_metrics import draft_metrics
from plait.platform.server.image_metrics import encoder_metrics
from plait.platform.server.series import LABELS, counters
from plait.platform.step_trace import ROW_KINDS

if TYPE_CHECKING:
    from plait.platform.config import EngineConfig
    from plait.platform.messages import Stats
    from plait.platform.server.client import EngineClient


class StatsCollector(Collector):
    """Gauges and counters of one engine."""

    def __init__(self, client: EngineClient, model_name: Callable[[], str]) -> None:
        self._client = client
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        """Nothing: registering must not need an engine that is ready."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What the newest `Stats` say."""
        try:
            labels = (self._model_name(), "0")
        except Overloaded:
            return
        stats = self._client.stats
        yield from _gauges(stats, labels)
        yield from _counters(stats, labels)
        yield from _rows(stats, labels)
        yield from _phases(stats, labels)
        yield from _probe(getattr(self._client, "facts", {}).get("probe") or {}, labels)
        yield from draft_metrics(stats, labels)
        config = self._client.config
        if config is not None:
            yield _cache_info(config, labels)
            yield _model_info(config, labels)
            if config.model.vision is not None:
                yield from encoder_metrics(stats, labels)


def _gauges(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    for name, text, value in (
        ("vllm:num_requests_running", "Sequences in the running set.", stats.num_running),
        ("vllm:num_requests_waiting", "Sequences that wait for a place.", stats.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_usage),
        ("plait:last_step_rows", "Token rows of the newest step.", stats.last_step_rows),
    ):
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
    reasons = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Waiting, by reason.", labels=(*LABELS, "reason")
    )
    reasons.add_metric((*labels, "capacity"), stats.num_waiting)
    yield reasons


def _counters(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    yield from counters(
        (
            ("vllm:prompt_tokens", "Prompt tokens, computed or found.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.", stats.prefix_hits),
            ("vllm:num_preemptions", "Sequences preempted.", stats.num_preemptions),
            ("vllm:prefix_cache_queries", "Tokens looked up.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found.", stats.prefix_hits),
            ("plait:steps", "Engine steps.", stats.num_steps),
            ("plait:step_seconds", "Seconds spent in engine steps.", stats.step_seconds),
        ),
        labels,
    )


def _rows(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    """How requests of all kinds are woven into the steps."""
    rows = CounterMetricFamily(
        "plait:step_rows",
        "Rows of steps by kind: prefill, decode and draft are all; adapter, image and masked ones "
        "are among them.",
        labels=(*LABELS, "kind"),
    )
    for kind, field in ROW_KINDS.items():
        rows.add_metric((*labels, kind), getattr(stats, field))
    steps = CounterMetricFamily(
        "plait:steps_by_strands",
        "Steps by which of adapters, images, drafts and grammars they had rows of.",
        labels=(*LABELS, "strands"),
    )
    for bits, count in enumerate(stats.steps_by_strands):
        names = [name for i, name in enumerate(STRANDS) if bits >> i & 1]
        steps.add_metric((*labels, "+".join(names) or "none"), count)
    yield from (rows, steps)


def _phases(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    """Where the steps' time goes, and what each part reached of the memory's rate."""
    if not stats.phases:
        return
    for name, text, value in (
        ("seconds", "Seconds of steps, by part.", 0),
        ("bytes", "Bytes of weights, K and V that parts of steps read, where it is known.", 1),
        ("operations", "Operations, two for a multiply-add, by part, where it is known.", 2),
    ):
        counter = CounterMetricFamily(f"plait:step_phase_{name}", text, labels=(*LABELS, "phase"))
        for phase, total in sorted(stats.phases.items()):
            if total[value]:
                counter.add_metric((*labels, phase), total[value])
        yield counter
    for name, text, value in (
        ("gb", "10⁹ bytes a second that a part of the steps read, over all steps so far.", 1),
        ("gop", "10⁹ operations a second of a part of the steps, over all steps so far.", 2),
    ):
        reached = GaugeMetricFamily(
            f"plait:step_phase_{name}_per_s", text, labels=(*LABELS, "phase")
        )
        for phase, total in sorted(stats.phases.items()):
            if total[value] and total[0]:
                reached.add_metric((*labels, phase), total[value] / total[0] / 1e9)
        yield reached


def _probe(reached: dict[str, float], labels: tuple[str, ...]) -> Iterator[Metric]:
    """What the machine gave when the engine started, by all its threads."""
    if not reached:
        return
    read = GaugeMetricFamily(
        "plait:probe_read_gb_per_s", "10⁹ bytes a second that memory gave when idle.", labels=LABELS
    )
    read.add_metric(labels, reached["read"])
    products = GaugeMetricFamily(
        "plait:probe_gop_per_s",
        "10⁹ operations a second that products reached when idle, by type.",
        labels=(*LABELS, "type"),
    )
    for kind, rate in reached.items():
        if kind != "read":
            products.add_metric((*labels, kind), rate)
    yield from (read, products)


def _model_info(config: EngineConfig, labels: tuple[str, ...]) -> Metric:
    model = config.model
    info = GaugeMetricFamily(
        "plait:model_info", "What computes, in which type.", labels=(*LABELS, "executor", "dtype")
    )
    info.add_metric((*labels, model.executor, model.dtype), 1)
    return info


def _cache_info(config: EngineConfig, labels: tuple[str, ...]) -> Metric:
    cache, scheduler = config.cache, config.scheduler
    facts = {
        "block_size": cache.block_size,
        "cache_dtype": cache.dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "num_blocks": max(group.num_blocks for group in cache.groups),
        "kv_cache_size_tokens": cache.num_tokens,
        "kv_cache_max_concurrency": round(cache.num_tokens / scheduler.max_model_len, 2),
    }
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV cache, as labels.", labels=(*LABELS, *facts)
    )
    info.add_metric((*labels, *(str(fact) for fact in facts.values())), 1)
    return info
