"""Series that every part of `/metrics` has: counters of one value, under the server's labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily

LABELS = ("model_name", "engine")


def counters(
    rows: Iterable[tuple[str, str, float]], labels: tuple[str, ...], *, prefix: str = ""
) -> Iterator[CounterMetricFamily]:
    """One counter for each name, text and value; `labels` are the values of `LABELS`."""
    for name, text, value in rows:
        counter = CounterMetricFamily(prefix + name, text, labels=LABELS)
        counter.add_metric(labels, value)
        yield counter
