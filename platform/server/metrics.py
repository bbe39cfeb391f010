"""Prometheus metrics: vLLM's names where they mean the same, `plait:` for our own.

Per-request timings are taken here, in the API process, on its monotonic clock; gauges and
engine counters come from the engine's newest `Stats` when they are scraped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastapi import APIRouter
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from starlette.requests import Request
from starlette.responses import Response

from plait.platform.core import Event, SamplingParams
from plait.platform.server.adapters.usage import LimitedRegistry
from plait.platform.server.image_metrics import ImageMetrics
from plait.platform.server.stats import StatsCollector

if TYPE_CHECKING:
    from plait.platform.server.access import Access
    from plait.platform.server.client import EngineClient
    from plait.platform.server.context import ServerContext

_LABELS = ("model_name", "engine")
_ENGINE = "0"
_LAG_INTERVAL_S = 0.25
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TTFT_BUCKETS = (*_TTFT, 20, 40, 80, 160, 640, 2560)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_GAP_BUCKETS = (*_GAP, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LONG_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKEN_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_HTTP_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(
        self, client: EngineClient, *, model_name: Callable[[], str], version: str
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._timings: dict[str, Timings] = {}
        self._families = Families(self.registry)
        self.images = ImageMetrics(self.registry)
        self.rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused before admission.",
            ["reason"],
            registry=self.registry,
        )
        self.http_requests = Counter(
            "http_requests",
            "HTTP requests by route, method and status.",
            ["handler", "method", "status"],
            registry=self.registry,
        )
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds from a request's head to the end of its response.",
            ["handler", "method"],
            buckets=_HTTP_BUCKETS,
            registry=self.registry,
        )
        self.loop_lag = Gauge(
            "plait:event_loop_lag_seconds",
            "Longest delay of the server's event loop in the last ten seconds.",
            registry=self.registry,
        )
        build = Gauge("plait:build_info", "Plait's version.", ["version"], registry=self.registry)
        build.labels(version).set(1)
        self.registry.register(StatsCollector(client, model_name))
        ProcessCollector(registry=self.registry)

    def sequence(
        self, arrival_s: float, params: SamplingParams, num_prompt_tokens: int
    ) -> SequenceTimer:
        """A timer for one sequence of a request that arrived at `arrival_s`."""
        name = self._model_name()
        timings = self._timings.get(name)
        if timings is None:
            timings = self._timings[name] = Timings(self._families, name)
        return SequenceTimer(timings, arrival_s, params, num_prompt_tokens)

    def render(self, access: Access) -> bytes:
        """The text that Prometheus scrapes, as far as the caller may know of it."""
        if access.adapters is None:
            return generate_latest(self.registry)
        return generate_latest(LimitedRegistry(self.registry, access))


class Families:
    """Histograms and counters of requests, labelled by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=registry)

        self.first = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _TTFT_BUCKETS
        )
        self.gap = histogram("inter_token_latency_seconds", "Between two tokens.", _GAP_BUCKETS)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean gap of a sequence.", _GAP_BUCKETS
        )
        self.whole = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _LONG_BUCKETS
        )
        self.queue = histogram(
            "request_queue_time_seconds", "In the engine, before the first step.", _LONG_BUCKETS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _LONG_BUCKETS
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _LONG_BUCKETS
        )
        self.inference = histogram(
            "request_inference_time_seconds",
            "From the first step to the last token.",
            _LONG_BUCKETS,
        )
        self.preemptions = histogram(
            "request_num_preemptions", "How often a sequence was parked.", (0, 1, 2, 5, 10, 20)
        )
        self.prompt = histogram("request_prompt_tokens", "Prompt tokens.", _TOKEN_BUCKETS)
        self.output = histogram("request_generation_tokens", "Output tokens.", _TOKEN_BUCKETS)
        self.n = histogram("request_params_n", "The parameter n.", (1, 2, 5, 10, 20))
        self.max_tokens = histogram(
            "request_params_max_tokens", "The parameter max_tokens.", _TOKEN_BUCKETS
        )
        self.success = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )


class Timings:
    """`Families` for one model: label look-ups done once."""

    def __init__(self, families: Families, model_name: str) -> None:
        def child(histogram: Histogram) -> Histogram:
            return histogram.labels(model_name, _ENGINE)

        self.first, self.gap = child(families.first), child(families.gap)
        self.per_token, self.whole = child(families.per_token), child(families.whole)
        self.queue, self.prefill = child(families.queue), child(families.prefill)
        self.decode, self.inference = child(families.decode), child(families.inference)
        self.preemptions = child(families.preemptions)
        self.prompt, self.output = child(families.prompt), child(families.output)
        self.n, self.max_tokens = child(families.n), child(families.max_tokens)
        self._success, self._model_name = families.success, model_name

    def ended(self, reason: str) -> None:
        """Count one sequence."""
        self._success.labels(self._model_name, _ENGINE, reason).inc()


class SequenceTimer:
    """Takes the times of one sequence from its events."""

    __slots__ = ("_arrival_s", "_ended", "_first_s", "_last_s", "_params", "_prompt", "_timings")

    def __init__(
        self, timings: Timings, arrival_s: float, params: SamplingParams, num_prompt_tokens: int
    ) -> None:
        self._timings = timings
        self._arrival_s = arrival_s
        self._params = params
        self._prompt = num_prompt_tokens
        self._first_s: float | None = None
        self._last_s = arrival_s
        self._ended = False

    def event(self, event: Event) -> None:
        """Observe what an event tells."""
        num_new = len(event.token_ids)
        if num_new:
            self._tokens(num_new, time.monotonic())
        if event.finish_reason is not None:
            self._finish(event)
            self._end(event.finish_reason.value)

    def _tokens(self, num_new: int, now_s: float) -> None:
        num_gaps = num_new
        if self._first_s is None:
            self._first_s = now_s
            self._timings.first.observe(now_s - self._arrival_s)
            num_gaps -= 1
            self._last_s = now_s
        for _ in range(num_gaps):
            self._timings.gap.observe((now_s - self._last_s) / num_gaps)
        self._last_s = now_s

    def _finish(self, event: Event) -> None:
        timings, num_output = self._timings, event.num_output_tokens
        timings.whole.observe(time.monotonic() - self._arrival_s)
        timings.prompt.observe(self._prompt)
        timings.output.observe(num_output)
        timings.n.observe(self._params.n)
        if self._params.max_tokens is not None:
            timings.max_tokens.observe(self._params.max_tokens)
        timings.queue.observe(event.queued_s)
        timings.preemptions.observe(event.num_preemptions)
        if self._first_s is not None:
            started_s = min(self._arrival_s + event.queued_s, self._first_s)
            timings.prefill.observe(self._first_s - started_s)
            timings.inference.observe(self._last_s - started_s)
            timings.decode.observe(self._last_s - self._first_s)
            if num_output > 1:
                timings.per_token.observe((self._last_s - self._first_s) / (num_output - 1))

    def close(self) -> None:
        """The request is over; what has not ended was aborted."""
        self._end("abort")

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._timings.ended(reason)


class LagMeter:
    """Keeps the worst of the event loop's newest delays."""

    def __init__(self, gauge: Gauge, *, num_kept: int) -> None:
        self._gauge = gauge
        self._newest: deque[float] = deque(maxlen=num_kept)

    def record(self, lag_s: float) -> None:
        """One measurement: how late the loop ran what was due."""
        self._newest.append(max(0.0, lag_s))
        self._gauge.set(max(self._newest))


async def measure_lag(gauge: Gauge) -> None:
    """Measure for ever; run as a task of the server's life."""
    meter = LagMeter(gauge, num_kept=round(10 / _LAG_INTERVAL_S))
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + _LAG_INTERVAL_S
        await asyncio.sleep(_LAG_INTERVAL_S)
        meter.record(loop.time() - due_s)


def metrics_router(context: ServerContext) -> APIRouter:
    """Routes of this family."""
    router = APIRouter()

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus text format."""
        text = context.metrics.render(request.state.access)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router
