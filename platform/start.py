"""From options to a running engine, in named phases with their seconds.

The same way for the engine process and for the offline `LLM`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from plait.platform import budget
from plait.platform.config import EngineConfig, ModelInfo, Options
from plait.platform.errors import ConfigError
from plait.platform.intake import Intake
from plait.platform.machine.cores import num_threads, usable_cores
from plait.platform.machine.instruction_set import check_instruction_set
from plait.platform.starting.light_torch import import_torch, paused_collection
from plait.platform.step_trace import StepTrace
from plait.platform.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from plait.adapters.pool import AdapterPool, Load
    from plait.adapters.sites import ModelSites
    from plait.platform.engine import Engine
    from plait.platform.executor import Executor
    from plait.platform.starting.speculation import Loaded
    from plait.platform.strand import Strand
    from plait.structured.strand import GrammarStrand
    from plait.vision.strand import VisionStrand

OnPhase = Callable[[str, float], None]  # (phase, seconds); 0 seconds when it begins

CALIBRATION = (0, 1, 3, 7, 15)  # drafts beside one row, in the steps of the warm-up
MAX_WARM_UP_S = 1.0  # after which what is not measured yet is learned while serving
# Memory that is read to learn what the machine gives, beyond what usual caches hold; and how long.
_PROBE_MEGABYTES = 64
_PROBE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What no request has needed yet."""

    imports: Callable[[], object]  # seconds; may run beside steps
    # A second; between steps only: while a model is built, torch's default dtype is another one.
    load: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An engine ready to take requests, with what the start found out."""

    engine: Engine
    tokenizer: Tokenizer
    sites: ModelSites  # where adapters can change the model
    probe: Callable[[], dict[str, float]]  # what the machine gives; half a second of all cores
    phases: dict[str, float]
    facts: dict[str, object] = field(default_factory=dict)
    rest: Rest | None = None


# Its length is that of a list: one phase behind the other, each with what it needs of those before.
def start_engine(
    options: Options,
    on_phase: OnPhase = lambda _phase, _seconds: None,
    *,
    load_grammars: bool = False,
    light: bool = False,
) -> Started:
    """Load the model, fit memory, warm up; with `load_grammars` what they need, for a server.

    The libraries of grammars take a second to load, in which other requests would stand still.
    `light`: torch may come without what only tracing needs (`light_torch.py`).

    Raises `PlaitError`: `ConfigError` or `ModelUnsupported` with the exact cause.
    """
    _check_draft(options)
    trace = None if options.trace_steps is None else StepTrace(options.trace_steps)
    phase = _Phases(on_phase)
    with phase("import torch"):
        import_torch(light=light)
        with paused_collection():
            import torch

            from plait.platform.model import load_model

        torch.set_num_threads(num_threads(options))
        check_instruction_set()
    drafts = options.draft_model is not None and options.speculation != "off"
    if drafts:  # a wrong path is told before minutes go into the model's weights
        from plait.platform.starting.head_loading import find_head

        head = find_head(options)
    with phase("load model"):
        loaded = load_model(options)
    with phase("load tokenizer"):
        tokenizer = Tokenizer.load(
            loaded.tokenizer_source,
            chat_template=options.chat_template,
            compile_templates=options.chat_template is not None,  # the user's is checked now
        )
    executor = loaded.executor
    draft = None
    if drafts:
        with phase("load draft model"):
            from plait.platform.starting.speculation import load_drafting

            draft = load_drafting(options, head, executor, tokenizer)
    model = _served(executor.model, tokenizer, options, () if draft is None else draft.notes)
    # Pages of mapped files count as free for as long as nobody needs them, and we do.
    mapped_bytes = model.mapped_bytes + (0 if draft is None else draft.mapped_bytes)
    with phase("allocate KV"):
        fit = budget.fit(
            options,
            model,
            executor.kv_groups,
            executor.kv_dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
            budget.available_bytes() - mapped_bytes,
            None if draft is None else draft.sizes,
        )
        executor.allocate(fit.cache)
        if draft is not None:
            draft.allocate(fit.cache)
    config = EngineConfig(options=options, model=model, cache=fit.cache, scheduler=fit.scheduler)
    with phase("make engine"):
        engine = make_engine(config, executor, tokenizer, fit, draft, load_grammars=load_grammars)
    with phase("warm up"):
        _warm_up(engine, config, tokenizer)
    takes_images = model.vision is not None and fit.encoder_bytes > 0
    must_build = takes_images and not executor.is_vision_stored
    if trace is not None:
        engine.trace(trace)
    return Started(
        engine=engine,
        rest=Rest(imports=_import_models, load=executor.open_vision) if must_build else None,
        tokenizer=tokenizer,
        sites=executor.sites,
        probe=partial(_probe, options),
        phases=phase.seconds,
        facts={
            "arithmetic": list(fit.arithmetic),
            "kv_bytes": fit.kv_bytes,
            "adapter_bytes": fit.adapter_bytes,
            "adapter_host_bytes": fit.adapter_host_bytes,
            "encoder_bytes": fit.encoder_bytes,
        },
    )


class _Phases:
    """Names, times and tells the phases of a start."""

    def __init__(self, on_phase: OnPhase) -> None:
        self._on_phase = on_phase
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._on_phase(name, 0.0)
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began
        self._on_phase(name, self.seconds[name])


def _served(
    model: ModelInfo, tokenizer: Tokenizer, options: Options, notes: tuple[str, ...]
) -> ModelInfo:
    """The model as it is served: its ends, and what there is to say of it."""
    # A model may end its turns with a token that only its tokenizer names.
    ends = dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids))
    if model.vision is not None and options.encoder_cache_bytes == 0:
        notes += ("images are refused, as --encoder-cache-memory 0 asks",)
    return replace(model, eos_token_ids=tuple(ends), notes=model.notes + notes)


def _import_models() -> None:
    """What builds models in their families' classes."""
    from plait.platform.starting.light_imports import import_transformers

    import_transformers()
    import plait.platform.model.load  # noqa: F401


def _probe(options: Options) -> dict[str, float]:
    """What the machine gives now, 10⁹ a second by all threads: what steps reach is judged by it."""
    from plait.platform.machine import probing

    cores = usable_cores()
    reached = probing.reached(
        cores[: min(num_threads(options), len(cores))], seconds=_PROBE_S, megabytes=_PROBE_MEGABYTES
    )
    rates = {kind: reach.best for kind, reach in reached.gop_per_s.items()}
    return {"read": reached.read_gb_per_s.best} | rates


def _check_draft(options: Options) -> None:
    if options.draft_model == "":  # else it would be the directory one stands in
        raise ConfigError(
            "--draft wants a directory or hub id, and got nothing: name one, or leave it out",
            param="draft_model",
        )
    if options.draft_sampling not in ("coupled", "rejection"):
        raise ConfigError(
            f"--draft-sampling takes coupled or rejection, got {options.draft_sampling!r}",
            param="draft_sampling",
        )
    if options.draft_sampling == "rejection" and options.draft_model is None:
        raise ConfigError(
            "--draft-sampling rejection verifies what a draft model drew, and there is none: name "
            "one with --draft, or leave it out",
            param="draft_sampling",
        )


def make_engine(
    config: EngineConfig,
    executor: Executor,
    tokenizer: Tokenizer | None,
    fit: budget.Fit,
    draft: Loaded | None = None,
    *,
    load_grammars: bool = False,
) -> Engine:
    """An engine with a strand for every feature that there is memory for."""
    from plait.adapters.strand import AdapterStrand
    from plait.platform.engine import Engine

    # Grammars first: an open one is kept where adapters are not ready yet.
    grammars = _grammars(config, tokenizer) if tokenizer is not None else None
    if grammars is not None and load_grammars:
        grammars.warm()
    strands: list[Strand] = [] if grammars is None else [grammars]
    pool = None
    if fit.adapter_bytes:
        beside = getattr(draft, "executor", None)  # a head takes no adapters
        pool = _adapter_pool(config.options, executor, fit, beside)
        strands.append(AdapterStrand(pool, drain_s=config.options.adapter_drain_s))
    if fit.encoder_bytes:
        strands.append(_vision(config, executor, fit))
    drafter = sampler = None
    if config.options.speculation == "auto":
        from plait.platform.starting.speculation import make_sampler, make_speculator

        drafter = make_speculator(config, grammars, draft)
        strands.append(drafter)
        sampler = make_sampler(config)
    return Engine(
        config,
        executor,
        tokenizer,
        strands=strands,
        adapters=pool,
        drafter=drafter,
        sampler=sampler,
    )


def _vision(config: EngineConfig, executor: Executor, fit: budget.Fit) -> VisionStrand:
    from plait.vision.encoder_cache import EncoderCache
    from plait.vision.strand import VisionStrand

    assert config.model.vision is not None
    return VisionStrand(
        executor,
        config.model.vision,
        EncoderCache(fit.encoder_bytes),
        bytes_per_row=budget.bytes_per_embedding(config.model),
    )


def _grammars(config: EngineConfig, tokenizer: Tokenizer) -> GrammarStrand:
    from plait.structured.strand import GrammarStrand
    from plait.structured.vocabulary import Vocabulary

    return GrammarStrand(partial(Vocabulary.of_model, tokenizer, config.model))


def _adapter_pool(
    options: Options, executor: Executor, fit: budget.Fit, draft: Executor | None
) -> AdapterPool:
    """`draft` is the draft model's, for which adapters may bring adapters."""
    import torch

    from plait.adapters.draft_adapter import BothPlaces, load_with_draft
    from plait.adapters.loading import load_adapter
    from plait.adapters.pool import AdapterPool

    dtype = options.adapter_dtype

    def loads(into: Executor) -> Load:
        return partial(
            load_adapter,
            sites=into.sites,
            max_rank=options.max_adapter_rank,
            base_weight=into.base_weight,
            device_dtype=into.model.dtype if dtype == "auto" else dtype,
        )

    if dtype == "int8":
        for each in (executor, draft):
            if each is not None:
                each.keep_adapters_as(torch.int8)

    load_draft = None if draft is None else loads(draft)
    return AdapterPool(
        executor if draft is None else BothPlaces(executor, draft),
        partial(load_with_draft, load=loads(executor), load_draft=load_draft),
        device_bytes=fit.adapter_bytes,
        host_bytes=fit.adapter_host_bytes,
    )


def _warm_up(engine: Engine, config: EngineConfig, tokenizer: Tokenizer) -> None:
    """Two short requests, so that the first user does not pay for what happens only once.

    They also prove that the executor computes at all: a fault here fails the start with its cause.
    The second tells whoever drafts what steps of some sizes cost; none of their text is drafted.
    """
    from plait.platform.core import SamplingParams, Speculation
    from plait.platform.errors import InternalError

    intake, began = Intake(config, tokenizer), time.monotonic()
    most = config.scheduler.max_model_len - 1

    def run(num_tokens: int, num_steps: int, speculation: Speculation) -> None:
        engine.add(
            intake.request(
                request_id="warm-up",
                prompt_token_ids=(0,),
                params=SamplingParams(
                    max_tokens=min(num_tokens, most), temperature=0.0, ignore_eos=True
                ),
                cache_salt="warm-up",
                speculation=speculation,
            )
        )
        while engine.has_unfinished:
            for event in engine.step():
                if event.error is not None:
                    raise InternalError(f"the model cannot compute a first token: {event.error[1]}")
            num_steps -= 1
            if time.monotonic() - began > MAX_WARM_UP_S or not num_steps:
                engine.abort("warm-up")

    run(2, 2, Speculation(enabled=False))
    engine.drafter.calibrate(CALIBRATION)
    run(1 + sum(1 + n for n in CALIBRATION), 1 + len(CALIBRATION), Speculation())
