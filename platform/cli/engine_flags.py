"""Settings of the engine: the model, memory and batching, drafts, and what only a server has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.platform.cli.flags import Flag, flag
from plait.platform.cli.values import SIZE
from plait.platform.config import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings of the command line itself: they end here and reach no other part."""

    offline: bool = False
    cpu_isa: str | None = None
    log_level: str = "info"
    api_key_file: str | None = None
    insecure_public: bool = False
    speculative_config: str | None = None


def _model(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(Options, "Model", field, help, **more)


def _memory(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(Options, "Memory and batching", field, help, **more)


def _draft(field: str, help: str, **more: Any) -> Flag:  # noqa: A002
    return flag(Options, "Speculation", field, help, **more)


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
    _model(
        "num_threads",
        "Threads to compute with. Default: one per core.",
        name="threads",
        low=1,
        high=1024,  # of the kernels' pool
    ),
    _model("pin_threads", "Each thread stays on a core of its own."),
    _model("progress", "No progress bars."),
    flag(Launch, "Model", "offline", "Download nothing: use what lies on this machine."),
    flag(
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
        "kv_cache_dtype",
        "Type of KV; int8: half of bfloat16's memory. Default: as --dtype.",
        choices=("auto", "int8"),
    ),
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
SPECULATIVE_CONFIG = flag(
    Launch,
    "Speculation",
    "speculative_config",
    "vLLM's JSON in place of these: method, model, num_speculative_tokens.",
    metavar="JSON",
)
SERVED = (
    _model("served_model_name", "Name that requests use. Default: from MODEL."),
    _memory("max_num_queued_reqs", "Most requests waiting; beyond it, 503.", low=0),
    _memory("seed", "Seed for requests that bring none. Default: random.", low=0),
    flag(
        Options,
        "Server",
        "trace_steps",
        "File that gets a line of JSON for each step: its rows by kind, and what came of them.",
        metavar="FILE",
    ),
)
