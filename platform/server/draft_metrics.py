"""Drafts as metrics: vLLM's names, then what ours tell beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from plait.platform.server.series import LABELS, counters
from plait.speculative.tally import ROW_CLASSES

if TYPE_CHECKING:
    from plait.platform.messages import Stats


def draft_metrics(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    """Counters of drafts, and how the budget that chooses them does."""
    yield from _compatible(stats, labels)
    yield from _by_source(stats, labels)
    yield from _budget(stats, labels)


def _compatible(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    """Acceptance length is 1 + accepted / drafts, as with vLLM's names everywhere."""
    verified = sum(counts[0] for counts in stats.drafts.values())
    accepted = sum(counts[1] for counts in stats.drafts.values())
    yield from counters(
        (
            ("num_drafts", "Runs of drafts verified.", stats.num_draft_runs),
            ("num_draft_tokens", "Drafts verified.", verified),
            ("num_accepted_tokens", "Drafts that became output.", accepted),
        ),
        labels,
        prefix="vllm:spec_decode_",
    )
    places = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts that held, by their place in a run.",
        labels=(*LABELS, "position"),
    )
    for place, value in enumerate(stats.accepted_by_position):
        places.add_metric((*labels, str(place)), value)
    yield places


def _by_source(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "plait:draft_tokens",
        "Drafts by source and what became of them; only accepted and rejected ones had rows.",
        labels=(*LABELS, "source", "outcome"),
    )
    for source, (num_verified, num_output) in sorted(stats.drafts.items()):
        tokens.add_metric((*labels, source, "accepted"), num_output)
        tokens.add_metric((*labels, source, "rejected"), num_verified - num_output)
    for source, (by_grammar, by_budget) in sorted(stats.draft_cuts.items()):
        tokens.add_metric((*labels, source, "cut_grammar"), by_grammar)
        tokens.add_metric((*labels, source, "cut_budget"), by_budget)
    seconds = CounterMetricFamily(
        "plait:draft_seconds",
        "Seconds spent drafting by source, and choosing what to verify (budget).",
        labels=(*LABELS, "source"),
    )
    for source, spent_s in sorted(stats.draft_seconds.items()):
        seconds.add_metric((*labels, source), spent_s)
    off = CounterMetricFamily(
        "plait:speculation_off",
        "Times that a sequence got no drafts in a step, by reason.",
        labels=(*LABELS, "reason"),
    )
    for reason, num in sorted(stats.undrafted.items()):
        off.add_metric((*labels, reason), num)
    yield from (tokens, seconds, off)


def _budget(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    if stats.steps_by_drafts:
        rows = HistogramMetricFamily(
            "plait:budget_rows", "Drafts verified in a step that decodes.", labels=LABELS
        )
        buckets, num_steps = [], 0
        ends = (*map(str, ROW_CLASSES), "+Inf")
        for end, num in zip(ends, stats.steps_by_drafts, strict=True):
            num_steps += num
            buckets.append((end, num_steps))
        verified = sum(counts[0] for counts in stats.drafts.values())
        rows.add_metric(labels, buckets=buckets, sum_value=verified)
        yield rows
    if stats.foreseen_over_taken:
        foreseen = GaugeMetricFamily(
            "plait:budget_predicted_over_measured",
            "Seconds that the last steps were thought to take, over those that they took.",
            labels=LABELS,
        )
        foreseen.add_metric(labels, stats.foreseen_over_taken)
        yield foreseen
