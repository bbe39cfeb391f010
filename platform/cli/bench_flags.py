"""Settings of `plait bench`: what is measured, on what, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.platform.cli.flags import Flag, flag
from plait.platform.cli.values import SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """What `plait bench` measures, and how often."""

    json: str | None = None
    repeats: int = 3
    warm_up: bool = True
    input_len: int = 97
    output_len: int = 64
    prompt_file: str | None = None
    bench_seed: int = 0
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What `plait bench throughput` adds."""

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    random_adapters: int = 0
    adapter_rank: int = 16
    compare_speculation: bool = False
    explain: bool = False

    @property
    def compares(self) -> bool:
        """Whether several take turns, so that ratios are wanted."""
        return self.random_adapters > 0 or self.compare_speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """What `plait bench mixed` adds."""

    num_requests: int = 64
    random_adapters: int = 4
    adapter_rank: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Picturing:
    """What `plait bench images` adds."""

    image_sizes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """What `plait bench bandwidth` adds."""

    model_bytes: int = 320 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparing:
    """What `plait bench compare` and `plait bench peers` add."""

    engines: tuple[str, ...] = ()
    peers_dir: str = "build/peers"
    bench_dir: str = "build/bench"
    pages: str | None = None
    clock: str = "wall"
    install: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What `plait bench serve` adds."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: str | None = None
    compare: str | None = None
    compare_model: str | None = None
    chat: bool = False
    num_requests: int = 64
    concurrency: int | None = None
    request_rate: float | None = None
    goodput: tuple[str, ...] = ()


def _measure(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(Measuring, "Measurement", field, help, **more)


def _compare(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(Comparing, "Comparison", field, help, **more)


def _load(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(Load, "Load", field, help, **more)


MEASURING = (
    _measure("json", "Write all figures there; -: standard output.", metavar="FILE"),
    _measure("repeats", "Measurements; medians are shown.", low=1),
    _measure("warm_up", "No run before the first measurement."),
    _measure("input_len", "Tokens per prompt.", low=1),
    _measure("output_len", "Tokens per answer.", low=2),
    _measure("prompt_file", "Prompts, one a line. Default: random ones.", metavar="FILE"),
    _measure("bench_seed", "Seed of prompts and arrivals.", low=0),
)
CORES = (
    _measure(
        "cores",
        'Cores to run on, such as "0,1". Default: all; one where runs are compared.',
        low=0,
        metavar="LIST",
    ),
)
BATCHES = (
    flag(
        Batches,
        "Measurement",
        "batch_sizes",
        "Prompts at a time.",
        name="batch-size",
        low=1,
        metavar="LIST",
    ),
    flag(
        Batches,
        "Measurement",
        "random_adapters",
        "Measure with so many adapters too, one a request, in turns.",
        low=0,
    ),
    flag(Batches, "Measurement", "adapter_rank", "Rank of these adapters.", low=1),
    flag(
        Batches,
        "Measurement",
        "compare_speculation",
        "Run with and without drafts, in turns, on random prompts and on some to copy from.",
    ),
    flag(
        Batches,
        "Measurement",
        "explain",
        "Show where the time goes, beside what memory and processor can do.",
    ),
)
MIXING = (
    flag(Mixing, "Measurement", "num_requests", "Requests at once, of each sort.", low=1),
    flag(Mixing, "Measurement", "random_adapters", "Adapters of every second request.", low=0),
    flag(Mixing, "Measurement", "adapter_rank", "Rank of these adapters.", low=1),
)
PICTURING = (
    flag(
        Picturing,
        "Measurement",
        "image_sizes",
        "Pixels of an image. Repeatable. Default: 1184x848 and 2368x1696.",
        name="image-size",
        metavar="WxH",
    ),
)
COMPARING = (
    _compare(
        "engines",
        "Engine, or engine-weights (llama.cpp, plait-int8). Repeatable. Default: all there are.",
        name="engine",
        metavar="NAME",
    ),
    _compare("peers_dir", "Folder of the others' environments.", metavar="DIR"),
    _compare("bench_dir", "Folder for the model in other precisions, and logs.", metavar="DIR"),
    _compare("pages", "Folder for a page and a plot of the results.", metavar="DIR"),
    _compare(
        "clock",
        "Clock of the tables; processor: where other programs run too. JSON has both.",
        choices=("wall", "processor"),
    ),
)
PEERS = (
    next(flag for flag in COMPARING if flag.field == "peers_dir"),
    _compare("install", "Peer to install, into an environment of its own. Repeatable."),
)
FILLING = (
    flag(
        Filling,
        "Measurement",
        "model_bytes",
        "Bytes of the random model's packed matrices.",
        name="model-size",
        kind=SIZE,
        low=1 << 20,
    ),
)
LOAD = (
    _load("url", "Server to measure.", metavar="URL"),
    _load("model", "Its model. Default: the first it lists."),
    _load("api_key", "Its API key.", secret=True, metavar="KEY"),
    _load("compare", "Second server, measured in turns with the first.", metavar="URL"),
    _load("compare_model", "Model of the second server. Default: the first it lists."),
    _load("chat", "Ask /v1/chat/completions rather than /v1/completions."),
    _load("num_requests", "Requests per measurement.", low=1),
    _load("concurrency", "Most requests at a time. Default: 8, without --request-rate.", low=1),
    _load("request_rate", "Requests per second, at random times.", low=0.001),
    _load(
        "goodput",
        "Goal in milliseconds, such as ttft:500 (ttft, tpot, e2e). Repeatable.",
        metavar="GOAL",
    ),
)
