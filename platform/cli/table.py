"""All settings of all commands, one line each. Types and defaults are their dataclass's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.platform.cli.flags import Flag
from plait.platform.cli.values import ADAPTER, SIZE
from plait.platform.config import Options
from plait.platform.server.settings import Limits, ServerSettings
from plait.vision.limits import MAX_PIXELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings of the command line itself: they end here and reach no other part."""

    offline: bool = False
    cpu_isa: str | None = None
    log_level: str = "info"
    api_key_file: str | None = None
    insecure_public: bool = False
    speculative_config: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How `chat` and `complete` ask: fields of `SamplingParams`, and where to send them."""

    url: str | None = None
    api_key: str | None = None
    adapter: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Administering:
    """Which server `plait adapters` speaks to."""

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = None
    admin_key: str | None = None


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


def _flag(part: type, panel: str, field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return Flag(part=part, panel=panel, field=field, help=help, **more)


def _model(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(Options, "Model", field, help, **more)


def _memory(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(Options, "Memory and batching", field, help, **more)


def _draft(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(Options, "Speculation", field, help, **more)


def _http(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(ServerSettings, "Server", field, help, **more)


def _limit(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(Limits, "Limits of one request", field, help, **more)


def _answer(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(Asking, "Answer", field, help, **more)


def _measure(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(Measuring, "Measurement", field, help, **more)


def _compare(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(Comparing, "Comparison", field, help, **more)


def _load(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return _flag(Load, "Load", field, help, **more)


MODEL = (
    _model(
        "model",
        "Directory, Hugging Face id or GGUF file. Default: the embedded SmolLM2-135M-Instruct.",
        argument=True,
    ),
    _model("revision", "Branch, tag or commit of a Hugging Face id."),
    _model("dtype", "Type of weights and KV.", choices=("auto", "float32", "bfloat16")),
    _model(
        "quantization",
        "Weights: as the checkpoint has them, expanded to the dtype, or of so many bits.",
        choices=("auto", "none", "int8", "int4"),
    ),
    _model(
        "quantized_activations",
        "What quantised weights are multiplied with. Default: int8, but exact with float32.",
        choices=("auto", "exact", "int8"),
    ),
    _model(
        "packed_cache",
        'Folder that keeps packed weights for later starts, or "off". Default: the user\'s cache.',
        metavar="DIR",
    ),
    _model(
        "packed_cache_bytes",
        "Most that packed weights of all models take there.",
        name="packed-cache-size",
        kind=SIZE,
        low=0,
    ),
    _model("executor", "What computes the steps.", choices=("auto", "native", "torch")),
    _model("device", "Where it computes.", choices=("auto", "cpu")),
    _model("num_threads", "Threads to compute with. Default: one per core.", name="threads", low=1),
    _model("pin_threads", "Each thread stays on a core of its own."),
    _model("progress", "No progress bars."),
    _flag(Launch, "Model", "offline", "Download nothing: use what lies on this machine."),
    _flag(
        Launch,
        "Model",
        "cpu_isa",
        "Instruction set of the CPU kernels. Default: the best there is.",
        choices=("generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"),
        metavar="NAME",
    ),
)
TEMPLATE = (
    _model("chat_template", "Jinja file in place of the model's chat template.", metavar="FILE"),
)
MEMORY = (
    _memory("max_model_len", "Longest prompt + answer. Default: the model's, if it fits.", low=1),
    _memory("max_num_seqs", "Most sequences in one step. Default: what fits.", low=1),
    _memory("max_num_batched_tokens", "Most tokens in one step. Default: by machine.", low=1),
    _memory("block_size", "Tokens in a KV block.", low=1),
    _memory(
        "kv_cache_bytes",
        'Memory for KV, such as "2GiB". Default: what fits.',
        name="kv-cache-memory",
        kind=SIZE,
        low=1,
    ),
    _memory("memory_utilization", "Share to use of the memory free at start.", low=0.01, high=1),
    _memory("enable_prefix_caching", "Never reuse KV of prompts that begin alike."),
)
ADAPTER_MEMORY = (
    _memory(
        "adapter_memory_bytes",
        'Memory for adapters that can run, such as "512MiB"; 0: none. Default: a share.',
        name="adapter-memory",
        kind=SIZE,
        low=0,
    ),
    _memory(
        "adapter_host_bytes",
        "Memory for adapters that wait to run. Default: 4 times the above.",
        name="adapter-host-memory",
        kind=SIZE,
        low=0,
    ),
    _memory("max_adapter_rank", "Highest rank of an adapter.", name="max-adapter-rank", low=1),
    _memory(
        "adapter_dtype",
        "Type of adapters' low-rank weights where they run; auto: the model's.",
        choices=("auto", "int8"),
    ),
    _memory(
        "adapter_drain_s",
        "Seconds after which an adapter that waits makes room for itself.",
        name="adapter-drain-time",
        low=0,
    ),
)
VISION_MEMORY = (
    _memory(
        "encoder_cache_bytes",
        'Memory for embeddings of images, such as "512MiB"; 0: no images. Default: a share.',
        name="encoder-cache-memory",
        kind=SIZE,
        low=0,
    ),
)
SPECULATION = (
    _draft("speculation", "Whether to draft tokens ahead.", choices=("auto", "off")),
    _draft(
        "draft_model",
        "Directory or Hugging Face id of a smaller model, or an EAGLE-3 head, that drafts.",
        name="draft",
        aliases=("draft-model",),
        metavar="MODEL",
    ),
    _draft("max_draft_tokens", "Most drafts of one sequence in one step.", low=1),
    _draft(
        "draft_sampling",
        "How a draft model's drafts are verified; coupled: no text depends on drafts.",
        choices=("coupled", "rejection"),
    ),
)
SPECULATIVE_CONFIG = _flag(
    Launch,
    "Speculation",
    "speculative_config",
    "vLLM's JSON in place of these: method, model, num_speculative_tokens.",
    metavar="JSON",
)
ADAPTERS = (
    _flag(
        ServerSettings,
        "Adapters",
        "adapters",
        "Adapter to load at start: name=directory or name=hub-id. Repeat it for more.",
        aliases=("lora-modules",),
        kind=ADAPTER,
        metavar="NAME=PATH",
    ),
    _flag(
        ServerSettings,
        "Adapters",
        "adapter_dir",
        "Folder of adapters that requests and admins may have loaded, each by its name.",
        metavar="DIR",
    ),
    _flag(ServerSettings, "Adapters", "max_adapters", "Most adapters loaded.", low=0),
    _flag(
        ServerSettings,
        "Adapters",
        "admin_key",
        "Key that loading and unloading need. Default: neither is served.",
        secret=True,
        metavar="KEY",
    ),
)
SERVED = (
    _model("served_model_name", "Name that requests use. Default: from MODEL."),
    _memory("max_num_queued_reqs", "Most requests waiting; beyond it, 503.", low=0),
    _memory("seed", "Seed for requests that bring none. Default: random.", low=0),
    _flag(
        Options,
        "Server",
        "trace_steps",
        "File that gets a line of JSON for each step: its rows by kind, and what came of them.",
        metavar="FILE",
    ),
)
HTTP = (
    _http("host", "Address to listen on."),
    _http("port", "Port to listen on; 0: any that is free.", low=0, high=65535),
    _http("uds", "Unix socket to listen on, in place of host and port.", metavar="PATH"),
    _http("root_path", "Prefix under which a proxy serves the API.", metavar="PATH"),
    _http(
        "api_keys",
        "Key that requests must bring. Repeatable.",
        name="api-key",
        secret=True,
        metavar="KEY",
    ),
    _flag(Launch, "Server", "api_key_file", "File of keys, one a line.", metavar="FILE"),
    _flag(Launch, "Server", "insecure_public", "Listen beyond this machine without any key."),
    _http(
        "allowed_media",
        "Host to fetch images from, such as images.example.com or *.example.com. Repeatable.",
        name="allow-media-url",
        aliases=("allowed-media-domains",),
        metavar="HOST",
    ),
    _http("metrics_public", "Serve /metrics without a key."),
    _http("allowed_origins", "Web origin that may call. Repeatable.", metavar="ORIGIN"),
    _http("allow_unknown_fields", "Log unknown request fields, do not refuse them."),
    _http("log_requests", "No log line per request."),
    _flag(
        Launch,
        "Server",
        "log_level",
        "Least important lines to log.",
        choices=("debug", "info", "warning", "error"),
    ),
    _http(
        "keep_alive_interval_s",
        "Seconds of silence in a stream before a comment; 0: never.",
        name="sse-keep-alive-interval",
        low=0,
    ),
    _http(
        "header_delay_s",
        "Seconds a stream waits for an early error before its status.",
        name="stream-status-delay",
        low=0,
    ),
    _http(
        "shutdown_timeout_s",
        "Seconds that running requests get at shutdown.",
        name="shutdown-timeout",
        low=0,
    ),
    _http("num_threads", "Threads for templates and tokenizing.", name="api-threads", low=1),
)
LIMITS = (
    _limit("body_bytes", "Largest request body.", name="max-body-size", kind=SIZE, low=1024),
    _limit(
        "adapter_body_bytes",
        "Largest adapter sent as tensors.",
        name="max-adapter-body-size",
        kind=SIZE,
        low=1024,
    ),
    _limit("n", "Most answers (n).", name="max-n", low=1, high=16),
    _limit("stop", "Most stop strings.", name="max-stop", low=1, high=16),
    _limit("prompts", "Most prompts.", name="max-prompts", low=1),
    _limit("messages", "Most messages.", name="max-messages", low=1),
    _limit("images", "Most images.", name="max-images", low=0),
    _limit("image_bytes", "Largest image file.", name="max-image-bytes", kind=SIZE, low=1024),
    _limit(
        "image_pixels",
        "Most pixels of an image, by its header.",
        name="max-image-pixels",
        low=1,
        high=MAX_PIXELS,
    ),
    _limit(
        "image_body_bytes",
        "Largest chat, where the model takes images.",
        name="max-image-body-size",
        kind=SIZE,
        low=1024,
    ),
)
ANSWER = (
    _answer("url", "Ask the server at this URL; MODEL then is its name there.", metavar="URL"),
    _answer("api_key", "API key of that server.", secret=True, metavar="KEY"),
    _answer(
        "adapter",
        "Adapter to answer with: a directory or hub id; with --url its name there.",
        metavar="ADAPTER",
    ),
    _answer("max_tokens", "Longest answer. Default: up to the context's end.", low=1),
    _answer("temperature", "0: always the likeliest token.", low=0, high=100),
    _answer("top_p", "Choose within this probability of the likeliest.", low=0.0001, high=1),
    _answer("top_k", "Choose among so many likeliest tokens; 0: all.", low=0),
    _answer("min_p", "Drop tokens below this share of the likeliest.", low=0, high=1),
    _answer("repetition_penalty", "Above 1: fewer repetitions.", low=0.01, high=100),
    _answer("seed", "Same seed, same answer.", low=0),
    _answer("stop", "Text that ends the answer. Repeatable.", metavar="TEXT"),
)
SYSTEM = (_answer("system", "System message."),)

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
    _flag(
        Batches,
        "Measurement",
        "batch_sizes",
        "Prompts at a time.",
        name="batch-size",
        low=1,
        metavar="LIST",
    ),
    _flag(
        Batches,
        "Measurement",
        "random_adapters",
        "Measure with so many adapters too, one a request, in turns.",
        low=0,
    ),
    _flag(Batches, "Measurement", "adapter_rank", "Rank of these adapters.", low=1),
    _flag(
        Batches,
        "Measurement",
        "compare_speculation",
        "Run with and without drafts, in turns, on random prompts and on some to copy from.",
    ),
    _flag(
        Batches,
        "Measurement",
        "explain",
        "Show where the time goes, beside what memory and processor can do.",
    ),
)
MIXING = (
    _flag(Mixing, "Measurement", "num_requests", "Requests at once, of each sort.", low=1),
    _flag(Mixing, "Measurement", "random_adapters", "Adapters of every second request.", low=0),
    _flag(Mixing, "Measurement", "adapter_rank", "Rank of these adapters.", low=1),
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
    _flag(
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
ADMIN = (
    _flag(Administering, "Server", "url", "Server to speak to.", metavar="URL"),
    _flag(Administering, "Server", "api_key", "Its API key.", secret=True, metavar="KEY"),
    _flag(
        Administering,
        "Server",
        "admin_key",
        "Its admin key, which load and unload need.",
        secret=True,
        metavar="KEY",
    ),
)
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
    _flag(
        Picturing,
        "Measurement",
        "image_sizes",
        "Pixels of an image. Repeatable. Default: 1184x848 and 2368x1696.",
        name="image-size",
        metavar="WxH",
    ),
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
