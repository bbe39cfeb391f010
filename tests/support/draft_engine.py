"""A real engine with a draft model all of whose drafts are verified."""

from __future__ import annotations

from pathlib import Path

from plait.adapters.store import AdapterStore
from plait.adapters.strand import AdapterStrand
from plait.platform import budget
from plait.platform.config import EngineConfig, Options
from plait.platform.core import AdapterUse, Event, Request, SamplingParams
from plait.platform.drafting import NoDrafts
from plait.platform.engine import Engine
from plait.platform.messages import AdapterLoaded, LoadAdapter
from plait.platform.model import load_model
from plait.platform.start import _adapter_pool
from plait.platform.starting.draft_loading import LoadedDraft, load_draft
from plait.platform.text.tokenizer import Tokenizer
from plait.speculative.draft_model import DraftModel
from plait.speculative.source import Want

PROMPTS = [tuple(range(5, 30 + 7 * i)) for i in range(4)]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=24, seed=1, top_p=0.95, frequency_penalty=0.4),
]


def options(model: Path, draft: Path | None = None, **rest: object) -> Options:
    return Options(
        model=str(model),
        draft_model=None if draft is None else str(draft),
        block_size=4,
        kv_cache_bytes=4 << 20,
        num_threads=1,
        progress=False,
        max_num_batched_tokens=16,
        max_num_seqs=16,
        **rest,  # type: ignore[arg-type]
    )


class Drafts(NoDrafts):
    """Implements `Drafter`: four drafts of a model for each sequence."""

    def __init__(self, source: DraftModel) -> None:
        self.source = source

    def draft(self, sequences, room) -> None:
        wants = [Want(sequence=s, limit=4) for s in sequences]
        for want, draft in zip(wants, self.source.propose(wants), strict=True):
            if draft is not None:
                want.sequence.drafts[:] = draft.tokens


class DraftEngine:
    """An engine as it is started, but for who drafts."""

    def __init__(self, chosen: Options, root: Path | None = None) -> None:
        loaded = load_model(chosen)
        executor = loaded.executor
        self.draft: LoadedDraft | None = None
        if chosen.draft_model is not None:
            tokenizer = Tokenizer.load(loaded.tokenizer_source)
            self.draft = load_draft(chosen, loaded.info, executor.kv_groups, tokenizer)
        draft = self.draft
        sizes = None if draft is None else draft.sizes
        self.fit = budget.fit(
            chosen, loaded.info, executor.kv_groups, executor.kv_dtype, 1 << 30, sizes
        )
        executor.allocate(self.fit.cache)
        config = EngineConfig(
            options=chosen, model=loaded.info, cache=self.fit.cache, scheduler=self.fit.scheduler
        )
        drafter = None
        if draft is not None:
            draft.allocate(self.fit.cache)
            self.source = draft.source(config, mask=None)
            drafter = Drafts(self.source)
        pool, strands = None, []
        if root is not None:
            self.store = AdapterStore(root)
            beside = None if draft is None else draft.executor
            pool = _adapter_pool(chosen, executor, self.fit, beside)
            strands = [AdapterStrand(pool, drain_s=1.0)]
        self.engine = Engine(
            config, executor, None, strands=strands, adapters=pool, drafter=drafter
        )
        self.ends: list[Event] = []

    def load(self, folder: Path) -> AdapterLoaded:
        """Load an adapter, and wait for it."""
        stored = self.store.add_directory(folder)
        message = LoadAdapter(generation=stored.generation, directory=str(stored.directory))
        self.engine.load_adapter(message)
        while not (answers := self.engine.take_adapter_results()):
            self.engine.step()
        (answer,) = answers
        return answer

    def run(self, *uses: tuple[AdapterUse, ...]) -> dict[str, list[int]]:
        """The tokens of all prompts with all samplings, with the one or other adapters."""
        for i, prompt in enumerate(PROMPTS):
            for j, params in enumerate(SAMPLINGS):
                self.engine.add(
                    Request(
                        request_id=f"{i}{j}",
                        prompt_token_ids=prompt,
                        params=params,
                        adapters=uses[(2 * i + j) % len(uses)] if uses else (),
                    )
                )
        tokens: dict[str, list[int]] = {}
        while self.engine.has_unfinished:
            for event in self.engine.step():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
                self.ends += [event] * (event.finish_reason is not None)
        return tokens

    @property
    def num_drafts(self) -> int:
        return sum(end.num_draft_tokens for end in self.ends)

    @property
    def num_held(self) -> int:
        return sum(end.num_accepted_tokens for end in self.ends)
