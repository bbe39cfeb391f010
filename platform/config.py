"""Configuration: frozen, one class per part, resolved once to final values.

The command line, environment and YAML files fill `Options` (what the user asked, None where
they left it to us); `platform/budget.py` turns it, with the model and the machine in view, into
these classes. Nothing changes them afterwards, and each part gets only its own.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_SCALE_BYTES = 4  # of a head of a token, beside its codes where KV is int8


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked. None means: choose what fits."""

    model: str | None = None  # directory, hub id, GGUF file; None: the embedded default
    revision: str | None = None
    served_model_name: str | None = None
    chat_template: str | None = None  # file or Jinja text that replaces the checkpoint's own
    dtype: str = "auto"  # auto | float32 | bfloat16
    quantization: str = "auto"  # auto: as the checkpoint has it | none | int8 | int4
    quantized_activations: str = "auto"  # auto: by dtype | exact | int8
    packed_cache: str | None = None  # folder of packed weights; None: the user's; "off": none
    packed_cache_bytes: int = 16 << 30
    executor: str = "auto"  # auto | native | torch
    device: str = "auto"  # auto | cpu
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"  # auto: the dtype | int8
    kv_cache_bytes: int | None = None
    memory_utilization: float = 0.8  # share of the memory free at start
    enable_prefix_caching: bool = True
    adapter_memory_bytes: int | None = None  # placed adapters; None: a share of the budget
    adapter_host_bytes: int | None = None  # adapters in host memory; None: 4 times the above
    max_adapter_rank: int = 256
    adapter_dtype: str = "auto"  # auto (the model's) | int8: of adapters' low-rank weights
    encoder_cache_bytes: int | None = None  # embeddings of images; None: a share of the budget
    adapter_drain_s: float = 2.0  # an adapter that waits longer makes room for itself
    speculation: str = "auto"  # auto | off
    draft_model: str | None = None  # directory or hub id of a draft model or EAGLE-3 head
    max_draft_tokens: int = 16  # most drafts of one sequence in one step
    draft_sampling: str = "coupled"  # coupled | rejection: how the draft model's are verified
    num_threads: int | None = None
    pin_threads: bool = False  # each stays on a core of its own
    seed: int | None = None  # for requests that bring none; None: random each time
    trace_steps: str | None = None  # file that gets a line of JSON for each step
    progress: bool = True  # bars while loading and generating


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers that share one block table: same kind of state, same retention.

    window: tokens a row may see including itself; None = all before it.
    """

    layers: tuple[int, ...]  # model layer indices, in order
    window: int | None
    num_kv_heads: int
    head_size: int  # of K; V may be narrower and is stored padded to it
    num_blocks: int = 0  # block 0 is the null block and never handed out

    def bytes_per_block(
        self, block_size: int, bytes_per_value: int, bytes_per_scale: int = 0
    ) -> int:
        """Bytes of K and V that one block of all the group's layers takes.

        `bytes_per_scale` are kept beside each head of a token.
        """
        bytes_per_head = self.head_size * bytes_per_value + bytes_per_scale
        return 2 * len(self.layers) * self.num_kv_heads * block_size * bytes_per_head


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV cache: block size in tokens, groups with their number of blocks, dtype by name."""

    block_size: int
    groups: tuple[KVGroup, ...]
    dtype: str  # float32 | bfloat16
    enable_prefix_caching: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that fit, by the scarcest group that must hold whole sequences."""
        full = [g for g in self.groups if g.window is None] or list(self.groups)
        return min((g.num_blocks - 1) * self.block_size for g in full)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Bounds of a step and of the queue."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int  # requests waiting for their first admission
    watermark: float = 0.02  # share of blocks kept for running decodes at admission


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInfo:
    """How a model takes images."""

    family: str  # transformers' model type
    hidden_size: int  # D of the language model
    num_levels: int  # 1, and 1 more for each layer after which the tower's features are added
    image_token_id: int  # stands in the prompt for each embedding
    has_grid_positions: bool  # positions have three rows: time, height, width (M-RoPE)
    bidirectional: str = ""  # what sees itself whole: "image" (each run of them) | "prefix" | ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the rest of Plait needs to know of a loaded model."""

    name: str  # served name
    architecture: str  # transformers class
    source: str  # "directory" | "hub" | "gguf" | "embedded"; never a path
    dtype: str
    executor: str
    vocab_size: int
    context_length: int  # the model's own limit
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    weight_formats: tuple[tuple[str, int], ...] = ()  # (name, bytes), most bytes first
    weights_from: str = ""  # how they were had, for the banner
    mapped_bytes: int = 0  # of the weights in a mapped file, which the system counts as free
    notes: tuple[str, ...] = ()  # what is off and why, for the banner
    vision: VisionInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an engine is built from, resolved."""

    options: Options
    model: ModelInfo
    cache: CacheConfig
    scheduler: SchedulerConfig
