"""Answers `plait chat` and `plait complete` with an engine in this process."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

from plait.platform.api import LLM, CompletionDelta
from plait.platform.cli.answering import Message, Piece
from plait.platform.config import Options
from plait.platform.core import SamplingParams
from plait.platform.demo.default import default_adapters
from plait.platform.starting.light_torch import import_torch

_ADAPTER = "adapter"  # the name of the only one


class LocalAnswerer:
    """Loads the model; streams one answer at a time."""

    def __init__(self, options: Options, adapter: str | None = None) -> None:
        adapters = {} if adapter is None else {_ADAPTER: _source(options, adapter)}
        # Conversations in a terminal are text: images of the model need not be served.
        text = dataclasses.replace(options, encoder_cache_bytes=0)
        import_torch(light=True)
        self._llm = LLM(**dataclasses.asdict(text), adapters=adapters)
        self._adapter = None if adapter is None else _ADAPTER

    @property
    def name(self) -> str:
        """The model's served name."""
        return self._llm.config.model.name

    def chat(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[Piece]:
        """The answer to a conversation."""
        return self._stream(self._llm.encode_chat(messages, adapter=self._adapter), params)

    def complete(self, prompt: str, params: SamplingParams) -> Iterator[Piece]:
        """What follows a text."""
        return self._stream(self._llm.tokenizer.encode(prompt), params)

    def close(self) -> None:
        """Give the model back."""
        self._llm.close()

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[Piece]:
        count = 0
        # Closed here: whatever ends this answer must end it in the engine too.
        deltas = cast(
            "Generator[CompletionDelta]",
            self._llm.stream(token_ids, params, adapter=self._adapter),
        )
        with closing(deltas), _interrupts_between_steps() as raise_interrupt:
            for delta in deltas:
                count += len(delta.token_ids)
                yield Piece(
                    text=delta.text,
                    num_prompt_tokens=len(token_ids),
                    num_output_tokens=count,
                    finish_reason=delta.finish_reason,
                )
                raise_interrupt()


def _source(options: Options, adapter: str) -> str | Path:
    """What lies here under that name goes before what the default model brings."""
    if options.model is not None or Path(adapter).exists():
        return adapter
    return default_adapters(options).get(adapter, adapter)


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the function given is called: in its midst a step must not end."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    pressed = threading.Event()

    def raise_if_pressed() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield raise_if_pressed
    finally:
        signal.signal(signal.SIGINT, before)
