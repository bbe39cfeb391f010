"""An engine that answers at once, from a script: HTTP tests need no model, no torch, no socket.

`FakeEngine` is an `EngineClient`. Its tokenizer, intake and output text are the real ones, over a
byte-level vocabulary: one token is one byte, so characters of several bytes span tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from plait.adapters.info import (
    AdapterInfo,
    AdapterLevel,
    AdapterState,
    LoadReport,
    SiteReport,
)
from plait.platform.config import (
    CacheConfig,
    EngineConfig,
    KVGroup,
    ModelInfo,
    Options,
    SchedulerConfig,
)
from plait.platform.core import Event, FinishReason, Request, TokenLogprobs
from plait.platform.errors import PlaitError
from plait.platform.messages import Stats
from plait.platform.text.chat_templates import ChatTemplates
from plait.platform.text.output import OutputText
from plait.platform.text.tokenizer import Tokenizer
from plait.platform.text.tokenizer_files import TokenizerFiles

BOS, EOS, IM_START, IM_END = range(256, 260)
VOCAB_SIZE = 260
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)
REPLY = "Grüße 👋🏽, all of you!"


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    return Tokenizer(
        TokenizerFiles(
            backend=backend,
            bos_token_id=BOS,
            eos_token_ids=(EOS,),
            chat_templates=ChatTemplates({"default": TEMPLATE}, {}),
        )
    )


def make_config(
    *, max_model_len: int = 4096, max_num_seqs: int = 64, max_num_queued: int = 64
) -> EngineConfig:
    group = KVGroup(layers=(0,), window=None, num_kv_heads=1, head_size=8, num_blocks=1024)
    return EngineConfig(
        options=Options(),
        model=ModelInfo(
            name="fake-model",
            architecture="FakeForCausalLM",
            source="directory",
            dtype="float32",
            executor="torch",
            vocab_size=VOCAB_SIZE,
            context_length=max_model_len,
            eos_token_ids=(EOS,),
            weight_bytes=0,
        ),
        cache=CacheConfig(
            block_size=16, groups=(group,), dtype="float32", enable_prefix_caching=True
        ),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            max_num_queued=max_num_queued,
        ),
    )


def logprobs_of(token_id: int) -> TokenLogprobs:
    """Of the chosen token; it is second best where its id is odd."""
    other = (token_id + 1) % 256
    if token_id % 2:
        top = ((other, -0.25), (token_id, -1.5), ((token_id + 2) % 256, -4.0))
        return TokenLogprobs(token_id=token_id, logprob=-1.5, rank=2, top=top)
    top = ((token_id, -0.5), (other, -1.0), ((token_id + 2) % 256, float("-inf")))
    return TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)


def make_info(generation: str, **fields: Any) -> AdapterInfo:
    """What an engine tells of an adapter that changes one site."""
    site = SiteReport(name="model.layers.0.q", kind="low_rank", rank=8, scale=1.0, change_norm=0.5)
    report = LoadReport(sites=(site,), num_tensors=2, changes_kv=True, num_bytes=64)
    defaults = {"report": report, "kv_digest": generation, "num_bytes": 64, "device_bytes": 64}
    return AdapterInfo(generation=generation, **defaults | fields)


class FakeEngine:
    """Answers each sequence with `reply(request, index)`, one token an event unless `split` says.

    `gate`: tokens after the first wait for it. `fail_after`: an error after that many events.
    `raise_first`: what `stream` raises before anything else. Adapters: `info_of` tells
    what loading a generation found, or raises; `load_gate`: loads wait for it.
    """

    def __init__(self, *, config: EngineConfig | None = None) -> None:
        self.tokenizer = make_tokenizer()
        self.config: EngineConfig | None = config or make_config()
        self.stats = Stats()
        self.ready = True
        self.healthy = True
        self.unhealthy_reason = ""
        self.reply: Callable[[Request, int], str] = lambda _request, _index: REPLY
        self.split: Callable[[int], list[int]] = lambda num_tokens: [1] * num_tokens
        self.drafts: dict[str, tuple[int, int]] = {}  # of each answer: source → verified, output
        self.gate: asyncio.Event | None = None
        self.raise_first: Exception | None = None
        self.fail_after: tuple[int, Event | Exception] | None = None
        self.requests: list[Request] = []
        self.timeouts: list[float | None] = []
        self.num_open = 0
        self.aborted: list[str] = []
        self.drained: list[float] = []
        self.closed = False
        self.info_of: Callable[[str, Path], AdapterInfo] = lambda generation, _: make_info(
            generation
        )
        self.load_gate: asyncio.Event | None = None
        self.loads: list[tuple[str, bool, bool]] = []  # generation, pinned, allow_zero_delta
        self.directories: dict[str, Path] = {}  # where each generation was read from last
        self.pin_error: PlaitError | None = None
        self.pins: list[tuple[str, bool]] = []
        self.dropped: list[str] = []
        self.extended: dict[str, Tokenizer] = {}
        self.adapter_states: dict[str, AdapterState] = {}

    async def load_adapter(
        self,
        generation: str,
        directory: str,
        *,
        pinned: bool = False,
        allow_zero_delta: bool = False,
        added_tokens: tuple[Any, ...] = (),
    ) -> AdapterInfo:
        self.loads.append((generation, pinned, allow_zero_delta))
        self.directories[generation] = Path(directory)
        if self.load_gate is not None:
            await self.load_gate.wait()
        info = self.info_of(generation, Path(directory))
        self.extended[generation] = self.tokenizer.extended(added_tokens)
        self.adapter_states[generation] = AdapterState(level=AdapterLevel.DEVICE, pinned=pinned)
        return info

    async def pin_adapter(self, generation: str, *, pinned: bool) -> None:
        if self.pin_error is not None:
            raise self.pin_error
        self.pins.append((generation, pinned))

    async def drop_adapter(self, generation: str) -> None:
        self.dropped.append(generation)
        self.adapter_states.pop(generation, None)

    async def stream(
        self, request: Request, *, timeout_s: float | None = None
    ) -> AsyncIterator[Event]:
        self.requests.append(request)
        self.timeouts.append(timeout_s)
        if self.raise_first is not None:
            raise self.raise_first
        self.num_open += 1
        ended = False
        try:
            for number, event in enumerate(self._interleaved(request)):
                if self.fail_after is not None and number == self.fail_after[0]:
                    fault = self.fail_after[1]
                    if isinstance(fault, Exception):
                        raise fault
                    yield fault
                yield event
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(0)
            ended = True
        except PlaitError:
            ended = True
            raise
        finally:
            self.num_open -= 1
            if not ended:
                self.aborted.append(request.request_id)

    def _tokenizer(self, request: Request) -> Tokenizer:
        known = [self.extended.get(use.generation) for use in request.adapters]
        return next((one for one in known if one is not None), self.tokenizer)

    def _interleaved(self, request: Request) -> Iterator[Event]:
        """Events of all sequences in turn, as steps give them."""
        running = [self._events(request, index) for index in range(request.params.n)]
        while running:
            for events in list(running):
                event = next(events, None)
                if event is None:
                    running.remove(events)
                else:
                    yield event

    def _events(self, request: Request, index: int) -> Iterator[Event]:
        tokens, reason, stop = self._answer(request, index)
        text = OutputText(self._tokenizer(request), request.params, request.prompt_token_ids)
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None and index == 0:
            prompt_logprobs = tuple(map(logprobs_of, request.prompt_token_ids[1:]))
        num_done = 0
        for size in self.split(len(tokens)) or [0]:
            new = tokens[num_done : num_done + size]
            num_done += len(new)
            for token in new:
                text.append(token)
            last = num_done == len(tokens)
            yield Event(
                request_id=request.request_id,
                index=index,
                token_ids=tuple(new),
                text=text.take(final=last),
                logprobs=_logprobs(request, new),
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason if last else None,
                stop_reason=stop if last else None,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_output_tokens=num_done,
                num_cached_tokens=len(request.prompt_token_ids) // 16 * 16,
                draft_counts=tuple((s, *counts) for s, counts in sorted(self.drafts.items())),
            )
            prompt_logprobs = None

    def _answer(
        self, request: Request, index: int
    ) -> tuple[list[int], FinishReason, int | str | None]:
        """Tokens of the reply, cut by max_tokens, and by stop strings as the engine does."""
        params = request.params
        tokens = [
            *self._tokenizer(request).encode(self.reply(request, index), add_special_tokens=False),
            EOS,
        ]
        text = OutputText(self._tokenizer(request), params, request.prompt_token_ids)
        for number, token in enumerate(tokens[: params.max_tokens], 1):
            stop = text.append(token)
            if stop is not None:
                return tokens[:number], FinishReason.STOP, stop
        if params.max_tokens is not None and params.max_tokens < len(tokens):
            return tokens[: params.max_tokens], FinishReason.LENGTH, None
        return tokens, FinishReason.STOP, None

    async def drain(self, timeout_s: float) -> None:
        self.drained.append(timeout_s)
        self.ready = False

    async def close(self) -> None:
        self.closed = True


def _logprobs(request: Request, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return () if request.params.logprobs is None else tuple(map(logprobs_of, tokens))
