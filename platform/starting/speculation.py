"""What drafts tokens for an engine: loaded as the options say, and put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.platform.errors import ConfigError
from plait.platform.logits.rejecting import RejectingSampler
from plait.platform.starting.draft_loading import LoadedDraft, load_draft
from plait.platform.starting.head_loading import LoadedHead, load_drafting_head
from plait.speculative.economy import Economy
from plait.speculative.lookup import SequenceLookup
from plait.speculative.recent import RecentAnswers
from plait.speculative.source import Sources
from plait.speculative.speculator import Speculator

if TYPE_CHECKING:
    from pathlib import Path

    from plait.platform.config import EngineConfig, Options
    from plait.platform.core import Sequence
    from plait.platform.executor import Executor
    from plait.platform.sampling import Sampler
    from plait.platform.text.tokenizer import Tokenizer
    from plait.structured.strand import GrammarStrand

Loaded = LoadedDraft | LoadedHead


def load_drafting(
    options: Options, head: Path | None, executor: Executor, tokenizer: Tokenizer
) -> Loaded:
    """Load `options.draft_model` to draft for the model of `executor`.

    `head`: where it lies, if it is one (`find_head`); else it is a model.
    Raises `ConfigError` or `ModelUnsupported`, of `draft_model` or `draft_sampling`.
    """
    if head is not None:
        if options.draft_sampling == "rejection":
            raise ConfigError(
                "--draft-sampling rejection is for draft models, and --draft names an EAGLE head: "
                "leave it out, and its drafts are coupled",
                param="draft_sampling",
            )
        return load_drafting_head(head, options, executor)
    return load_draft(options, executor.model, executor.kv_groups, tokenizer)


def make_sampler(config: EngineConfig) -> Sampler | None:
    """What verifies drafts, if not as usual."""
    if config.options.draft_sampling == "coupled":
        return None
    return RejectingSampler(config.model.vocab_size, config.model.eos_token_ids)


def make_speculator(
    config: EngineConfig, grammars: GrammarStrand | None, loaded: Loaded | None
) -> Speculator:
    """Drafts from all sources that there are: text always, and what was loaded."""
    vocab_size = config.model.vocab_size
    mask = None if grammars is None else grammars.forbid
    model = head = None

    def follows(sequence: Sequence) -> bool:
        return speculator.follows(sequence)

    if isinstance(loaded, LoadedHead):
        head = loaded.source(config, mask=mask, follows=follows)
    elif loaded is not None:
        model = loaded.source(config, mask=mask)
    speculator = Speculator(
        Economy(),
        Sources(
            constraints=grammars,
            texts=(SequenceLookup(vocab_size), RecentAnswers(vocab_size)),
            model=model,
            head=head,
        ),
        max_tokens=config.options.max_draft_tokens,
        vocab_size=vocab_size,
        draws=config.options.draft_sampling == "rejection",
    )
    return speculator
