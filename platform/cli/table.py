"""Which settings each command has. Types and defaults are their dataclass's."""

from __future__ import annotations

from plait.platform.cli.asking_flags import ADMIN, ANSWER, SYSTEM
from plait.platform.cli.bench_flags import (
    BATCHES,
    COMPARING,
    CORES,
    FILLING,
    LOAD,
    MEASURING,
    MIXING,
    PEERS,
    PICTURING,
)
from plait.platform.cli.engine_flags import (
    ADAPTER_MEMORY,
    MEMORY,
    MODEL,
    SERVED,
    SPECULATION,
    SPECULATIVE_CONFIG,
    TEMPLATE,
    VISION_MEMORY,
)
from plait.platform.cli.server_flags import ADAPTERS, HTTP, LIMITS

ENGINE = (*MODEL, *MEMORY)
# `plait check` reads no second model.
CHECK = (
    *ENGINE,
    *ADAPTER_MEMORY,
    *VISION_MEMORY,
    *(flag for flag in SPECULATION if flag.field != "draft_model"),
)
SERVE = (
    *MODEL,
    *TEMPLATE,
    *SERVED,
    *MEMORY,
    *ADAPTER_MEMORY,
    *VISION_MEMORY,
    *SPECULATION,
    SPECULATIVE_CONFIG,
    *ADAPTERS,
    *HTTP,
    *LIMITS,
)
CHAT = (*MODEL, *TEMPLATE, *ANSWER, *SYSTEM, *MEMORY, *SPECULATION)
COMPLETE = (*(flag for flag in MODEL if not flag.argument), *ANSWER, *MEMORY, *SPECULATION)
BENCH = (*ENGINE, *CORES, *MEASURING)
THROUGHPUT = (*BATCHES, *BENCH, *ADAPTER_MEMORY, *SPECULATION)
COMPARE = (
    *(flag for flag in MODEL if flag.field == "model"),
    *BATCHES[:1],
    *COMPARING,
    *CORES,
    *(flag for flag in MEASURING if flag.field not in ("warm_up", "prompt_file")),
)
BENCH_IMAGES = (
    *ENGINE,
    *PICTURING,
    *CORES,
    *(flag for flag in MEASURING if flag.field in ("json", "repeats")),
)
BENCH_MIXED = (
    *MIXING,
    *ENGINE,
    *CORES,
    *(flag for flag in MEASURING if flag.field != "prompt_file"),
    *ADAPTER_MEMORY,
    *VISION_MEMORY,
    *SPECULATION,
)
BANDWIDTH = (
    *FILLING,
    *(flag for flag in MODEL if flag.field not in ("model", "revision")),
    *CORES,
    *(flag for flag in MEASURING if flag.field != "prompt_file"),
)
TOUR = tuple(flag for flag in MODEL if flag.field not in ("model", "revision"))
STARTUP = (*MODEL, *(flag for flag in MEASURING if flag.field in ("json", "repeats")))
BENCH_SERVE = (*LOAD, *MEASURING)
# What an environment variable or a line of a file may set, whichever command reads it.
KNOWN = tuple(
    {
        flag.key: flag
        for flag in (
            *(*THROUGHPUT, *COMPARE, *PEERS, *BANDWIDTH, *BENCH_IMAGES, *BENCH_SERVE),
            *(*ADMIN, *CHAT, *SERVE),
        )
    }.values()
)
