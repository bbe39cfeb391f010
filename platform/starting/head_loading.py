"""Loading an EAGLE-3 head that drafts from the model's own hidden rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from plait.platform.budget import DraftSizes
from plait.platform.errors import ConfigError, ModelUnsupported
from plait.platform.kv.pages import DTYPES
from plait.platform.machine.cores import num_threads, pinned_cores
from plait.platform.model.locating import locate
from plait.platform.sampling import Sampler
from plait.platform.starting.draft_loading import full_group, scratch_blocks
from plait.platform.starting.stored_head import recall_head
from plait.speculative.eagle import EagleSource, HeadBounds
from plait.speculative.eagle_config import is_head
from plait.speculative.eagle_head import EagleHead, load_head
from plait.speculative.eagle_program import Threads
from plait.speculative.eagle_weights import Kept

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from plait.platform.config import CacheConfig, EngineConfig, Options
    from plait.platform.core import Sequence
    from plait.platform.executor import Executor
    from plait.platform.ops.quantized_weight import Activations
    from plait.speculative.choice import Mask

_NUMBERS = ("bfloat16", "float32", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """A head that fits the model, ready but for its pages."""

    head: EagleHead
    group: int  # of the target, under whose block numbers its pages lie
    sizes: DraftSizes
    notes: tuple[str, ...]  # for the banner
    mapped_bytes: int = 0  # its weights are memory of their own

    def allocate(self, cache: CacheConfig) -> None:
        """Create its pages beside those of the target's `cache`."""
        num_blocks = cache.groups[self.group].num_blocks + self.sizes.num_scratch
        self.head.allocate(num_blocks, cache.block_size)

    def source(
        self, config: EngineConfig, *, mask: Mask | None, follows: Callable[[Sequence], bool]
    ) -> EagleSource:
        """What drafts with it for an engine of `config`; see `EagleSource`."""
        model, cache = config.model, config.cache
        bounds = HeadBounds(
            block_size=cache.block_size,
            group=self.group,
            num_blocks=cache.groups[self.group].num_blocks,
            num_scratch=self.sizes.num_scratch,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
        sampler = Sampler(model.vocab_size, model.eos_token_ids)
        return EagleSource(
            self.head,
            bounds,
            choose=sampler.choose,
            takes_likeliest=sampler.takes_likeliest,
            mask=mask,
            follows=follows,
        )


def find_head(options: Options) -> Path | None:
    """Where `options.draft_model` lies, if it is a head and no model by itself."""
    try:
        path = locate(replace(options, model=options.draft_model, revision=None)).path
    except (ConfigError, ModelUnsupported) as error:
        raise type(error)(f"--draft: {error.message}", param="draft_model") from error
    return path if is_head(path) else None


def load_drafting_head(path: Path, options: Options, executor: Executor) -> LoadedHead:
    """Load the head in `path` for the model of `executor`.

    Raises `ConfigError` or `ModelUnsupported`, of the parameter `draft_model`.
    """
    group = full_group(executor.kv_groups, executor.model)
    try:
        kept = _kept(options, executor)
        recall = partial(recall_head, options, path, kept)
        head = load_head(path, executor, kept, _threads(options), recall)
    except ModelUnsupported as error:
        raise ModelUnsupported(f"--draft: {error.message}", param="draft_model") from error
    bytes_per_value = DTYPES[executor.kv_dtype].itemsize
    return LoadedHead(
        head=head,
        group=group,
        sizes=DraftSizes(
            bytes_per_block=head.kv_group.bytes_per_block(options.block_size, bytes_per_value),
            weight_bytes=head.weight_bytes,
            num_scratch=scratch_blocks(options),
        ),
        notes=_notes(head),
    )


def _kept(options: Options, executor: Executor) -> Kept:
    """Numbers beside numbers, and 4 bits beside a quantised model.

    What a head says is a guess. Of the default one's first drafts 0.434 hold with 4 bits, 0.439
    with 8, and it goes along with each step, in half the time.
    """
    formats = [name for name, _ in executor.model.weight_formats]
    is_quantized = bool(formats) and formats[0] not in _NUMBERS
    if options.quantization == "none" or not is_quantized:
        return Kept()
    activations = options.quantized_activations
    if activations == "auto":
        activations = "exact" if executor.model.dtype == "float32" else "int8"
    return Kept(bits=4, activations=cast("Activations", activations))


def _threads(options: Options) -> Threads:
    """As many as compute the model, which waits meanwhile."""
    return Threads(count=num_threads(options), pin=pinned_cores(options))


def _notes(head: EagleHead) -> tuple[str, ...]:
    config = head.config
    taps = ", ".join(map(str, head.taps))
    notes = [f"draft: {config.name}, an EAGLE-3 head on what layers {taps} of the model are given"]
    if config.draft_vocab_size != config.vocab_size:
        notes.append(
            f"draft: it knows {config.draft_vocab_size:,} of {config.vocab_size:,} tokens, and "
            "drafts no others"
        )
    return tuple(notes)
