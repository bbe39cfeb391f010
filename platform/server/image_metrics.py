"""Images as metrics: their way to the engine, taken here, and what the engine's `Stats` tell."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from plait.platform.errors import InvalidImage, PlaitError
from plait.platform.server.series import LABELS, counters

if TYPE_CHECKING:
    from plait.platform.messages import Stats
    from plait.vision.held import HeldImages
    from plait.vision.later import ServedProcessor
    from plait.vision.preparation import ImagePreparation

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class ImageMetrics:
    """How long images take until the engine has them, how many are on that way, and refusals."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "plait:image_preparation_seconds",
            "Seconds that a request's images took to be fetched, decoded and processed.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._preparing = Gauge(
            "plait:images_preparing",
            "Images that are fetched, decoded or processed, or wait for that.",
            registry=registry,
        )
        self._refused = Counter(
            "plait:image_requests_refused",
            "Requests refused for their images before they reached the engine, by error code.",
            ["code"],
            registry=registry,
        )
        self._bytes = Gauge(
            "plait:image_bytes",
            "Memory for images: files, decoded ones, processed ones kept, and those of requests.",
            ["stage"],
            registry=registry,
        )

    @contextmanager
    def preparing(self, num_images: int) -> Iterator[None]:
        """Time the preparation of a request's images, and count its refusal."""
        began = time.monotonic()
        self._preparing.inc(num_images)
        try:
            yield
            self._seconds.observe(time.monotonic() - began)
        except PlaitError as error:
            self._refused.labels(error.code).inc()
            raise
        finally:
            self._preparing.dec(num_images)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a refusal of images while messages are read, which may have other faults."""
        try:
            yield
        except InvalidImage as error:
            self._refused.labels(error.code).inc()
            raise

    def watch(
        self, images: ImagePreparation, held: HeldImages, processor: ServedProcessor | None
    ) -> None:
        """Read memory with each scrape."""
        self._bytes.labels("requests").set_function(lambda: held.budget.used)
        self._bytes.labels("files").set_function(lambda: images.files.used)
        self._bytes.labels("decoded").set_function(lambda: images.pixels.used)
        if processor is not None:
            self._bytes.labels("processed").set_function(lambda: processor.kept_bytes)


def encoder_metrics(stats: Stats, labels: tuple[str, ...]) -> Iterator[Metric]:
    """What the engine did with images."""
    gauge = GaugeMetricFamily(
        "plait:encoder_cache_bytes", "Embeddings of images that are kept.", labels=LABELS
    )
    gauge.add_metric(labels, stats.encoder_bytes)
    yield gauge
    yield from counters(
        (
            ("encode_seconds", "Seconds of running the vision tower.", stats.encoder_seconds),
            ("encoded_images", "Images that the tower encoded.", stats.encoded_images),
            ("encoded_image_tokens", "Embeddings that it made of them.", stats.encoded_rows),
            ("image_tokens", "Token rows of steps that took an embedding.", stats.image_rows),
            ("encoder_cache_hits", "Images whose embeddings were there.", stats.encoder_hits),
            (
                "encoder_cache_misses",
                "Images whose embeddings were not.",
                stats.encoder_misses,
            ),
            (
                "encoder_cache_evictions",
                "Embeddings evicted for others.",
                stats.encoder_evictions,
            ),
        ),
        labels,
        prefix="plait:",
    )
