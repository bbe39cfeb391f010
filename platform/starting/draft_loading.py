"""Loading what drafts tokens beside the model: a smaller model that speaks in the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plait.platform.budget import MAX_NUM_SEQS, DraftSizes
from plait.platform.errors import ConfigError, ModelUnsupported
from plait.platform.kv.pages import DTYPES
from plait.platform.logits.rejecting import RejectingSampler
from plait.platform.model import load_model
from plait.platform.sampling import Sampler
from plait.platform.text.tokenizer import Tokenizer
from plait.speculative.draft_model import DraftBounds, DraftModel
from plait.speculative.draft_vocabulary import check_vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from plait.platform.config import CacheConfig, EngineConfig, KVGroup, ModelInfo, Options
    from plait.platform.executor import Executor
    from plait.platform.model.loaded import LoadedModel
    from plait.speculative.choice import Mask

# Sequences that can, in one step, draft beyond the blocks that they have.
_MAX_SCRATCH_SEQS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A draft model whose tokens were checked, ready but for its pages."""

    executor: Executor
    info: ModelInfo
    group: int  # of the target, under whose block numbers its pages lie
    sizes: DraftSizes
    notes: tuple[str, ...]  # for the banner

    @property
    def mapped_bytes(self) -> int:
        """Of its weights, in a mapped file."""
        return self.info.mapped_bytes

    def allocate(self, cache: CacheConfig) -> None:
        """Create its pages beside those of the target's `cache`."""
        num_blocks = cache.groups[self.group].num_blocks + self.sizes.num_scratch
        groups = tuple(replace(g, num_blocks=num_blocks) for g in self.executor.kv_groups)
        self.executor.allocate(replace(cache, groups=groups, dtype=self.executor.kv_dtype))

    def source(self, config: EngineConfig, *, mask: Mask | None) -> DraftModel:
        """What drafts with it for an engine of `config`. `mask` knows the grammars."""
        model, cache = config.model, config.cache
        bounds = DraftBounds(
            block_size=cache.block_size,
            group=self.group,
            num_blocks=cache.groups[self.group].num_blocks,
            num_scratch=self.sizes.num_scratch,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_rows=config.scheduler.max_num_batched_tokens,
        )
        if config.options.draft_sampling == "rejection":
            rejecting = RejectingSampler(model.vocab_size, model.eos_token_ids)
            draw, choose = rejecting.draw, rejecting.choose
            return DraftModel(self.executor, bounds, choose=choose, mask=mask, draw=draw)
        choose = Sampler(model.vocab_size, model.eos_token_ids).choose
        return DraftModel(self.executor, bounds, choose=choose, mask=mask)


def load_draft(
    options: Options, target: ModelInfo, groups: SequenceOf[KVGroup], tokenizer: Tokenizer
) -> LoadedDraft:
    """Load `options.draft_model` to draft for a model with these KV groups and this tokenizer.

    Raises `ConfigError` or `ModelUnsupported`, of the parameter `draft_model`.
    """
    group = full_group(groups, target)
    own = replace(
        options,
        model=options.draft_model,
        revision=None,
        served_model_name=None,
        max_model_len=None,
    )
    try:
        loaded = _load(own)
        its_tokenizer = Tokenizer.load(loaded.tokenizer_source)
    except (ConfigError, ModelUnsupported) as error:
        raise type(error)(f"--draft: {error.message}", param="draft_model") from error
    check_vocabulary(tokenizer, its_tokenizer, target_name=target.name, name=loaded.info.name)
    executor = loaded.executor
    bytes_per_value = DTYPES[executor.kv_dtype].itemsize
    sizes = DraftSizes(
        bytes_per_block=sum(
            g.bytes_per_block(options.block_size, bytes_per_value) for g in executor.kv_groups
        ),
        weight_bytes=loaded.info.weight_bytes,
        num_scratch=scratch_blocks(options),
    )
    return LoadedDraft(
        executor=executor,
        info=loaded.info,
        group=group,
        sizes=sizes,
        notes=_notes(options, target, loaded),
    )


def _load(options: Options) -> LoadedModel:
    """With the target's wishes for weights, where they mean anything for the draft model's."""
    try:
        return load_model(options)
    except ConfigError as error:
        if error.param not in ("quantization", "quantized_activations"):
            raise
        return load_model(replace(options, quantization="auto", quantized_activations="auto"))


def full_group(groups: SequenceOf[KVGroup], target: ModelInfo) -> int:
    """The target's first group without a window: its blocks keep every token of a sequence."""
    for index, group in enumerate(groups):
        if group.window is None:
            return index
    raise ConfigError(
        f"--draft is not served with {target.name}: all of its layers have sliding windows, whose "
        "blocks go while the draft model still needs them. Leave --draft out; drafts from the text "
        "itself are served",
        param="draft_model",
    )


def scratch_blocks(options: Options) -> int:
    """Blocks for drafts at positions for which a sequence has no block yet."""
    num_seqs = min(options.max_num_seqs or MAX_NUM_SEQS, _MAX_SCRATCH_SEQS)
    return num_seqs * -(-options.max_draft_tokens // options.block_size)


def _notes(options: Options, target: ModelInfo, loaded: LoadedModel) -> tuple[str, ...]:
    info = loaded.info
    notes = [f"draft: {info.name}, {loaded.num_parameters:,} parameters, {info.dtype}"]
    longest = options.max_model_len or target.context_length
    if info.context_length < longest:
        notes.append(
            f"draft: it drafts up to its own context of {info.context_length:,} tokens, and not "
            "behind that"
        )
    if target.vision is not None:
        notes.append("draft: it sees placeholders where the model sees images")
    return (*notes, *(f"draft: {note}" for note in info.notes))
