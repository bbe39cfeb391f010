"""What `plait serve` says: phases as they pass, and the banner when it is ready."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from plait.platform.cli.values import format_size
from plait.platform.config import EngineConfig, ModelInfo, Options

if TYPE_CHECKING:
    from plait.platform.server.process import ProcessClient

_NUM_SHOWN = 16  # adapters

Rows = list[tuple[str, str]]


class PhaseLog:
    """Prints each start-up phase with its seconds when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, phase: str, seconds: float) -> None:
        """A phase began (`seconds` 0) or ended."""
        if seconds > 0:
            self._console.print(f"  [dim]{seconds:6.2f} s[/]  {escape(phase)}", highlight=False)


def facts(config: EngineConfig) -> Rows:
    """The lines of the banner about the engine."""
    model, cache, scheduler = config.model, config.cache, config.scheduler
    kv_tokens, context = cache.num_tokens, scheduler.max_model_len
    own = f" of the model's {model.context_length:,}" if context < model.context_length else ""
    vision = None if config.options.encoder_cache_bytes == 0 else model.vision
    return [
        ("model", f"{model.name} ({model.source})"),
        ("architecture", model.architecture),
        ("weights", weights(model)),
        ("executor", f"{model.executor}, {model.dtype}"),
        ("context", f"{context:,} tokens{own}"),
        ("KV cache", f"{kv_tokens:,} tokens, {cache.dtype}, blocks of {cache.block_size}"),
        ("concurrency", f"{kv_tokens / context:.1f} requests of full context"),
        (
            "step",
            (
                f"up to {scheduler.max_num_seqs} sequences and "
                f"{scheduler.max_num_batched_tokens:,} tokens; {scheduler.max_num_queued} may wait"
            ),
        ),
        ("prefix cache", "on" if cache.enable_prefix_caching else "off, as asked"),
        ("speculation", speculation(config.options)),
        *([("images", f"taken, as {vision.family}")] if vision else []),
    ]


def weights(model: ModelInfo) -> str:
    """What weights are kept as, and how they were had."""
    parts = [f"{format_size(size)} {name}" for name, size in model.weight_formats]
    text = " + ".join(parts) or format_size(model.weight_bytes)
    return f"{text}; {model.weights_from}" if model.weights_from else text


def speculation(options: Options) -> str:
    """Where drafts come from."""
    if options.speculation == "off":
        return "off, as asked"
    sources = ["prompt and answer", "recent answers", "grammars"]
    if options.draft_model is not None:
        sources.append(Path(options.draft_model).name)
    most = options.max_draft_tokens
    return f"drafts from {', '.join(sources[:-1])} and {sources[-1]}; up to {most} a step"


def adapter_lines(options: Options, names: Sequence[str]) -> Iterator[str]:
    """Which adapters are loaded, and what adapters are kept as where that was asked for."""
    if names:
        more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
        yield ", ".join(names[:_NUM_SHOWN]) + more
    if options.adapter_dtype != "auto":
        yield f"kept as {options.adapter_dtype}, as asked"


def show(
    console: Console,
    client: ProcessClient,
    *,
    url: str,
    seconds: float,
    adapters: Sequence[str] = (),
) -> None:
    """Print the banner of a started engine."""
    config = client.config
    assert config is not None, "a started client has its engine's config"
    arithmetic: Any = client.facts.get("arithmetic", ())
    rows: Rows = [("URL", url), *facts(config)]
    rows += [("adapters", line) for line in adapter_lines(config.options, adapters)]
    rows += [("memory", line) for line in arithmetic]
    rows += [("note", note) for note in config.model.notes]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    last = ""
    for name, text in rows:
        table.add_row("" if name == last else name, escape(text))
        last = name
    title = f"Plait {importlib.metadata.version('plait')}, ready in {seconds:.1f} s"
    console.print(Panel(table, title=title, title_align="left", expand=False), highlight=False)
