"""What `plait serve` says: phases as they pass, and the banner when it is ready."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from plait.platform.cli.values import format_size
from plait.platform.config import EngineConfig

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
    own = f" (the model's own: {model.context_length:,})" if context < model.context_length else ""
    return [
        ("model", model.name),
        ("architecture", f"{model.architecture}, {format_size(model.weight_bytes)} of weights"),
        ("executor", f"{model.executor}, {model.dtype}"),
        ("context", f"{context:,} tokens{own}"),
        ("KV cache", f"{kv_tokens:,} tokens in blocks of {cache.block_size}, {cache.dtype}"),
        ("concurrency", f"{kv_tokens / context:.1f} requests of full context"),
        ("batch", f"up to {scheduler.max_num_seqs} sequences, {scheduler.max_num_batched_tokens:,} "
                  "tokens a step"),
        ("queue", f"up to {scheduler.max_num_queued} requests"),
        ("prefix cache", "on" if cache.enable_prefix_caching else "off: --no-enable-prefix-caching"),
    ]


def show(
    console: Console,
    config: EngineConfig,
    *,
    url: str,
    arithmetic: Iterable[str],
    seconds: float,
    phases: Mapping[str, float] | None = None,
) -> None:
    """Print the banner."""
    rows: Rows = [("url", url), *facts(config)]
    rows += [("memory", line) for line in arithmetic]
    rows += [("off", note) for note in config.model.notes]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    last = ""
    for name, text in rows:
        table.add_row("" if name == last else name, escape(text))
        last = name
    title = f"Plait {importlib.metadata.version('plait')} · ready in {seconds:.1f} s"
    console.print(Panel(table, title=title, title_align="left", expand=False, border_style="green"))


def examples(url: str, model: str) -> str:
    """Three commands to try, to be copied as they are."""
    chat: Any = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Name three rivers."}}]'
    text = f'{{"model": "{model}", "prompt": "The capital of France is", "max_tokens": 8}}'
    post = f"curl {url}/v1"
    kind = "-H 'Content-Type: application/json'"
    return (
        f"{post}/models\n"
        f"{post}/completions {kind} -d '{text}'\n"
        f"curl -N {url}/v1/chat/completions {kind} -d '{chat}, \"stream\": true}}'"
    )
