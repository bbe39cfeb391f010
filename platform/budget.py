"""One memory budget: what fits beside the weights, and the arithmetic in words.

Everything is counted in bytes. Where the user asked for nothing, we choose what the machine
holds; where he asked for what cannot be, the error names the flag and a value that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from plait.platform.config import (
    KV_SCALE_BYTES,
    CacheConfig,
    KVGroup,
    ModelInfo,
    Options,
    SchedulerConfig,
)
from plait.platform.errors import ConfigError

MAX_NUM_SEQS = 64  # two to sixty-four CPU cores: beyond it steps only get longer
MAX_NUM_BATCHED_TOKENS = 256  # a longer step would hold up the running streams
QUEUE_FACTOR = 4  # queued requests per running sequence
WORKSPACE_BYTES = 256 << 20  # activations and logits slices of a step, allocator slack
ADAPTER_SHARE = 20  # adapters that can run get this part of the budget …
MAX_ADAPTER_BYTES = 512 << 20  # … and not more than this, unless asked for
HOST_FACTOR = 4  # adapters that wait to run, in bytes of those that can
ENCODER_SHARE = 10  # embeddings of images get this part of the budget …
MAX_ENCODER_BYTES = 512 << 20  # … and not more than this, unless asked for
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSizes:
    """What a draft model takes. Its pages lie under the blocks of a group without a window."""

    bytes_per_block: int  # K and V of all its layers
    weight_bytes: int
    num_scratch: int  # blocks behind the target's


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What was chosen, and the arithmetic that led to it, one line each."""

    cache: CacheConfig
    scheduler: SchedulerConfig
    arithmetic: tuple[str, ...]
    kv_bytes: int  # the draft model's too
    adapter_bytes: int = 0  # of adapters that are placed; 0: none are served
    adapter_host_bytes: int = 0  # of adapters that wait to be
    encoder_bytes: int = 0  # of images' embeddings; 0: no images are served


def available_bytes() -> int:
    """Memory this process may still take: the machine's free memory within the cgroup's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None:
        available = min(available, limit - max((used or 0) - _cached_bytes(), 0))
    return max(available, 0)


def _cgroup(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cached_bytes() -> int:
    """Pages of files that count as the cgroup's: they go when memory is needed."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))


def fit(
    options: Options,
    model: ModelInfo,
    groups: tuple[KVGroup, ...],
    kv_dtype: str,
    available: int,
    draft: DraftSizes | None = None,
) -> Fit:
    """Choose context, batch bounds and the number of KV blocks.

    `available` counts bytes for KV and workspace, weights (those of `draft` too) already taken
    off. Raises `ConfigError` where an option cannot hold, naming a value that would.
    """
    _check(options)
    scheduler = _bounds(options, model)
    sizes = _Sizes(options.block_size, kv_dtype, groups, scheduler, draft)
    shares = _share(options, model, available)
    budget = shares.kv
    longest = sizes.longest_sequence(budget)
    if longest < min(2 * options.block_size, scheduler.max_model_len):
        block = sizes.bytes_for(options.block_size)
        if options.kv_cache_bytes is not None:
            raise ConfigError(
                f"--kv-cache-memory {human(budget)} holds no sequence: one block of KV takes "
                f"{human(block)} over all layers. Name more, or leave it out for what fits",
                param="kv_cache_memory",
            )
        raise ConfigError(
            f"no memory is left for KV: {human(budget)} of {human(available)} free after the "
            f"weights ({human(model.weight_bytes)}), and one block of every layer takes "
            f"{human(block)}. Free memory, use a smaller model, or raise --memory-utilization",
            param="memory_utilization",
        )
    if options.max_model_len is None and longest < scheduler.max_model_len:
        scheduler = replace(scheduler, max_model_len=longest)
        sizes = _Sizes(options.block_size, kv_dtype, groups, scheduler, draft)
    elif longest < scheduler.max_model_len:
        needed = sizes.bytes_for(scheduler.max_model_len)
        raise ConfigError(
            f"--max-model-len {scheduler.max_model_len} needs {human(needed)} of KV memory for "
            f"one sequence, but {human(budget)} is there. What fits: --max-model-len {longest}, "
            f"or --kv-cache-memory {_flag_value(needed, up=True)} if the machine has it",
            param="max_model_len",
        )
    useful = scheduler.max_num_seqs * (scheduler.max_model_len + options.block_size)
    if options.kv_cache_bytes is not None:
        useful = budget  # one byte per token is never reached: take all that was asked for
    tokens = sizes.most_tokens(budget, useful)
    cache = CacheConfig(
        block_size=options.block_size,
        groups=sizes.groups_for(tokens),
        dtype=kv_dtype,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    chosen = Fit(
        cache=cache,
        scheduler=scheduler,
        arithmetic=(),
        kv_bytes=sizes.bytes_for(tokens),
        adapter_bytes=shares.adapters,
        adapter_host_bytes=shares.adapters_host,
        encoder_bytes=shares.encoder,
    )
    arithmetic = _arithmetic(options, model, shares, chosen)
    if draft is not None:
        arithmetic = (*arithmetic, _draft_arithmetic(draft, sizes.draft_bytes_for(tokens)))
    return replace(chosen, arithmetic=arithmetic)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """The one budget, as it is divided: KV gets what adapters and images leave."""

    available: int
    kv: int
    adapters: int
    adapters_host: int
    encoder: int


def _check(options: Options) -> None:
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} must be at least 1, got {value}", param=name)
    if options.max_num_queued_reqs is not None and options.max_num_queued_reqs < 0:
        raise ConfigError("--max-num-queued-reqs must be at least 0", param="max_num_queued_reqs")
    for name in ("adapter_memory_bytes", "adapter_host_bytes", "encoder_cache_bytes"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ConfigError(f"{_flag(name)} must be at least 0, got {value}", param=name)
    if not 1 <= options.block_size <= 256:
        raise ConfigError("--block-size must lie in 1 to 256; 16 is a good one", param="block_size")
    if not 0.0 < options.memory_utilization <= 1.0:
        raise ConfigError(
            "--memory-utilization is a share above 0 and at most 1", param="memory_utilization"
        )


def _flag(name: str) -> str:
    known = {
        "kv_cache_bytes": "--kv-cache-memory",
        "adapter_memory_bytes": "--adapter-memory",
        "adapter_host_bytes": "--adapter-host-memory",
        "encoder_cache_bytes": "--encoder-cache-memory",
    }
    return known.get(name, "--" + name.replace("_", "-"))


def _bounds(options: Options, model: ModelInfo) -> SchedulerConfig:
    wanted = options.max_model_len
    if wanted is not None and wanted > model.context_length:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the model was made for: its context is "
            f"{model.context_length} tokens. Use --max-model-len {model.context_length} or less",
            param="max_model_len",
        )
    num_seqs, rows = options.max_num_seqs, options.max_num_batched_tokens
    if num_seqs is None:
        num_seqs = MAX_NUM_SEQS if rows is None else min(MAX_NUM_SEQS, rows)
    if rows is None:
        rows = max(MAX_NUM_BATCHED_TOKENS, num_seqs)
    if rows < num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {rows} is less than --max-num-seqs {num_seqs}: each "
            f"running sequence needs a token in each step. Use --max-num-seqs {rows}",
            param="max_num_batched_tokens",
        )
    queued = options.max_num_queued_reqs
    return SchedulerConfig(
        max_model_len=wanted or model.context_length,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=rows,
        max_num_queued=QUEUE_FACTOR * num_seqs if queued is None else queued,
    )


def _share(options: Options, model: ModelInfo, available: int) -> _Shares:
    """Divide what is free: workspace, images, adapters, KV. On a CPU all of it lies there."""
    workspace = min(WORKSPACE_BYTES, available // 4)
    most = max(available - workspace, 0)
    usual = max(int(available * options.memory_utilization) - workspace, 0)
    kv = options.kv_cache_bytes
    if kv is not None and kv > most:
        raise ConfigError(
            f"--kv-cache-memory {human(kv)} is more than is free: "
            f"{human(available)}, less {human(workspace)} to work with. What fits: "
            f"--kv-cache-memory {_flag_value(most, up=False)}",
            param="kv_cache_memory",
        )
    encoder = _encoder_bytes(options, model, usual=usual, left=most - (kv or 0))
    usual, most = max(usual - encoder, 0), most - encoder
    device, host = _adapter_bytes(options, usual=usual, left=most - (kv or 0))
    if device + host > most - (kv or 0):
        beside = "" if kv is None else f", beside --kv-cache-memory {human(kv)},"
        raise ConfigError(
            f"--adapter-memory {human(device)} and --adapter-host-memory {human(host)} are more "
            f"than is free{beside} {human(most - (kv or 0))}: lower one of them, or free memory",
            param="adapter_memory",
        )
    if kv is None:
        kv = max(min(usual - device, most - device - host), 0)
    return _Shares(available=available, kv=kv, adapters=device, adapters_host=host, encoder=encoder)


def bytes_per_embedding(model: ModelInfo) -> int:
    """Of one embedding of an image, with all its levels; 0 where the model has no vision."""
    if model.vision is None:
        return 0
    return model.vision.hidden_size * model.vision.num_levels * BYTES_PER_VALUE[model.dtype]


def _encoder_bytes(options: Options, model: ModelInfo, *, usual: int, left: int) -> int:
    """Bytes for images' embeddings: what is asked for, else a share that fits what is left."""
    asked, each = options.encoder_cache_bytes, bytes_per_embedding(model)
    if not each:
        if asked:
            raise ConfigError(
                "--encoder-cache-memory is for embeddings of images, and this model takes none: "
                "leave it out",
                param="encoder_cache_bytes",
            )
        return 0
    if asked is None:
        share = min(usual // ENCODER_SHARE, MAX_ENCODER_BYTES, left)
        return share if share >= each else 0
    if asked > left or 0 < asked < each:
        why = f"one embedding takes {human(each)}"
        if asked >= each:
            why = f"that is more than is free, {human(max(left, 0))}"
        raise ConfigError(
            f"--encoder-cache-memory {human(asked)} cannot be: {why}", param="encoder_cache_bytes"
        )
    return asked


def _adapter_bytes(options: Options, *, usual: int, left: int) -> tuple[int, int]:
    """Bytes of both tiers: what is asked for, else a share that fits what is left."""
    device, host = options.adapter_memory_bytes, options.adapter_host_bytes
    if device is None:
        share = min(usual // ADAPTER_SHARE, MAX_ADAPTER_BYTES)
        device = min(share, max(left - (host or 0), 0) // (1 if host else 2))
    if options.adapter_memory_bytes == 0 or (device == 0 and host is None):
        return 0, 0
    if host is None:
        host = min(HOST_FACTOR * device, max(left - device, device))
    return device, host


class _Sizes:
    """Bytes and blocks of KV for a number of tokens, over groups that retain differently.

    A group with a window never needs more than `max_num_seqs` times what one sequence can hold
    of it at once: its window, one step's chunk, and a block cut at either end.
    """

    def __init__(
        self,
        block_size: int,
        dtype: str,
        groups: tuple[KVGroup, ...],
        bounds: SchedulerConfig,
        draft: DraftSizes | None = None,
    ) -> None:
        self._block_size = block_size
        self._draft = draft
        self._groups = groups
        self._bounds = bounds
        sizes = (1, KV_SCALE_BYTES) if dtype == "int8" else (BYTES_PER_VALUE[dtype],)
        self._block_bytes = [g.bytes_per_block(block_size, *sizes) for g in groups]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _num_blocks(self, group: KVGroup, tokens: int) -> int:
        blocks = self._blocks(tokens)
        if group.window is not None:
            held = self._blocks(group.window + self._bounds.max_num_batched_tokens) + 2
            blocks = min(blocks, held * self._bounds.max_num_seqs)
        return blocks + 1  # the null block

    def groups_for(self, tokens: int) -> tuple[KVGroup, ...]:
        return tuple(replace(g, num_blocks=self._num_blocks(g, tokens)) for g in self._groups)

    def bytes_for(self, tokens: int) -> int:
        return self.draft_bytes_for(tokens) + sum(
            self._num_blocks(group, tokens) * size
            for group, size in zip(self._groups, self._block_bytes, strict=True)
        )

    def draft_bytes_for(self, tokens: int) -> int:
        """Of these, what the draft model takes: as many blocks as a group without a window."""
        draft = self._draft
        if draft is None:
            return 0
        return (self._blocks(tokens) + 1 + draft.num_scratch) * draft.bytes_per_block

    def most_tokens(self, budget: int, useful: int) -> int:
        """The most whole blocks of tokens, at most `useful`, that `budget` bytes hold."""
        low, high = 0, self._blocks(useful)
        while low < high:
            middle = (low + high + 1) // 2
            if self.bytes_for(middle * self._block_size) <= budget:
                low = middle
            else:
                high = middle - 1
        return low * self._block_size

    def longest_sequence(self, budget: int) -> int:
        limit = self._bounds.max_model_len
        tokens = self.most_tokens(budget, limit)
        return min(tokens, limit)


def _arithmetic(options: Options, model: ModelInfo, shares: _Shares, fit: Fit) -> tuple[str, ...]:
    cache, scheduler = fit.cache, fit.scheduler
    num_sequences = cache.num_tokens / scheduler.max_model_len
    per_token = fit.kv_bytes / max(cache.num_tokens, 1)
    how = (
        f"{options.memory_utilization:.0%} of it, less {human(WORKSPACE_BYTES)} to work with "
        "and what else is named here"
        if options.kv_cache_bytes is None
        else "asked for"
    )
    per_token_text = f"{per_token / 1024:.1f} KiB each in {len(cache.groups)} group(s)"
    lines = [
        f"weights {human(model.weight_bytes)}; free beside them {human(shares.available)}",
        _adapter_arithmetic(options, shares),
        *_encoder_arithmetic(options, model, shares),
        f"KV at most {human(shares.kv)} ({how}); taken {human(fit.kv_bytes)}",
        f"{cache.num_tokens:,} tokens of KV at {per_token_text}",
        f"context {scheduler.max_model_len:,} tokens: {num_sequences:.1f} full sequences at once",
    ]
    if scheduler.max_model_len < model.context_length and options.max_model_len is None:
        lines.append(
            f"the model's own context of {model.context_length:,} tokens does not fit; "
            "give more memory to serve it whole"
        )
    return tuple(lines)


def _draft_arithmetic(draft: DraftSizes, kv_bytes: int) -> str:
    return (
        f"draft model: weights {human(draft.weight_bytes)}; {human(kv_bytes)} of the KV, with "
        f"{draft.num_scratch} blocks for drafts that have none"
    )


def _adapter_arithmetic(options: Options, shares: _Shares) -> str:
    if not shares.adapters:
        asked = options.adapter_memory_bytes == 0
        return "no adapters: " + ("as asked for" if asked else "no memory is left for them")
    how = f"1/{ADAPTER_SHARE} of the budget, {human(MAX_ADAPTER_BYTES)} at most"
    if options.adapter_memory_bytes is not None:
        how = "asked for"
    return (
        f"adapters at most {human(shares.adapters)} ({how}), "
        f"and {human(shares.adapters_host)} for those that wait to run"
    )


def _encoder_arithmetic(options: Options, model: ModelInfo, shares: _Shares) -> tuple[str, ...]:
    each = bytes_per_embedding(model)
    if not each:
        return ()
    num_tokens = shares.encoder // each
    if not num_tokens:
        asked = options.encoder_cache_bytes == 0
        return ("no images: " + ("as asked for" if asked else "no memory is left for them"),)
    how = f"1/{ENCODER_SHARE} of the budget, {human(MAX_ENCODER_BYTES)} at most"
    if options.encoder_cache_bytes is not None:
        how = "asked for"
    line = f"embeddings of images {human(shares.encoder)} ({how}): {num_tokens:,} of {human(each)}"
    return (line + "; an image that takes more is refused",)


def human(num_bytes: int) -> str:
    """Bytes for people."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f}{unit}" if unit == "B" else f"{value:.2f}{unit}"


def _flag_value(num_bytes: int, *, up: bool) -> str:
    """Whole MiB for a flag, rounded to the side that still holds."""
    return f"{-(-num_bytes // 2**20) if up else num_bytes // 2**20}MiB"
