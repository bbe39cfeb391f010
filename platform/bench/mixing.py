"""Requests of all kinds at once, beside as many plain ones of the same lengths.

Of `num_requests`, every second one has an adapter, every second pair an image, every second four a
JSON schema, and all may be drafted for. When they are answered, the same engine answers plain
prompts of as many tokens with answers of as many, without any of that. What encoding images took
is left out: it has no counterpart.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from plait.platform.bench.copying import copying_texts
from plait.platform.bench.random_adapters import load_random_adapters
from plait.platform.bench.stats import median, ratio_in_turns
from plait.platform.bench.workload import Shape, random_token_prompts
from plait.platform.core import CompiledGrammar, FinishReason, Request, SamplingParams, Speculation
from plait.platform.errors import InternalError
from plait.platform.intake import Intake
from plait.platform.offline.sight import LocalSight
from plait.platform.step_trace import ROW_KINDS

if TYPE_CHECKING:
    from plait.adapters.info import AdapterInfo
    from plait.platform.start import Started

MIXED, PLAIN = "mixed", "plain"
_FIELDS = {"name": {"type": "string", "maxLength": 12}, "sure": {"type": "boolean"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {**_FIELDS, "place": {"enum": ["kitchen", "garden", "library"]}},
    "required": [*_FIELDS, "place"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How many requests, and what the mixed ones have."""

    num_requests: int
    num_adapters: int
    adapter_rank: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One batch: tokens of each answer, and the seconds, those of encoding images apart."""

    num_tokens: tuple[int, ...]
    seconds: float
    encoder_s: float
    rows: dict[str, int]

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.num_tokens) / (self.seconds - self.encoder_s)


class Mixer:
    """Makes and answers such requests on one engine."""

    def __init__(self, started: Started, mix: Mix) -> None:
        self._mix = mix
        self._engine, self._tokenizer = started.engine, started.tokenizer
        self._config = started.engine.config
        self._intake = Intake(self._config, self._tokenizer)
        self._sight = LocalSight(self._config, self._tokenizer)
        self._grammar = _compiled(started)
        self._adapters: list[AdapterInfo] = []
        if mix.num_adapters:
            self._adapters = load_random_adapters(
                started, count=mix.num_adapters, rank=mix.adapter_rank
            )
        self._num_runs = 0

    def measure(
        self, repeats: int, seed: int, tell: Callable[[str], None], *, warm_up: bool
    ) -> dict[str, Any]:
        """Rates of both, their medians and ratio."""
        if warm_up:
            tell("warming up")
            self._pair(seed + repeats, output_tokens=8)
        pairs = []
        for repeat in range(repeats):
            mixed, plain = self._pair(seed + repeat, output_tokens=self._mix.output_tokens)
            pairs.append((mixed, plain))
            tell(f"{repeat + 1}/{repeats}: mixed {mixed.rate:.1f} tok/s, plain {plain.rate:.1f}")
        rates = {MIXED: [m.rate for m, _ in pairs], PLAIN: [p.rate for _, p in pairs]}
        newest = pairs[-1][0]
        return {
            "tokens_per_s": {name: median(measured) for name, measured in rates.items()},
            "measured": rates,
            "ratio": ratio_in_turns(rates[MIXED], rates[PLAIN]),
            "tokens": sum(newest.num_tokens),
            "encoder_s": [m.encoder_s for m, _ in pairs],
            "rows": newest.rows,
        }

    def close(self) -> None:
        """End the threads."""
        self._sight.close()

    def _pair(self, seed: int, *, output_tokens: int) -> tuple[Answered, Answered]:
        asked = self._requests(seed, output_tokens)
        mixed = self._answer(asked)
        return mixed, self._answer(self._alike(asked, mixed, seed))

    def _requests(self, seed: int, output_tokens: int) -> list[Request]:
        count = self._mix.num_requests
        shape = Shape(
            batch_size=count, input_tokens=self._mix.input_tokens, output_tokens=output_tokens
        )
        texts = copying_texts(shape, lambda text: len(self._tokenizer.encode(text)), seed)
        self._num_runs += 1
        return [self._request(i, text, output_tokens) for i, text in enumerate(texts)]

    def _request(self, number: int, text: str, output_tokens: int) -> Request:
        has_image = number // 2 % 2 == 1 and self._config.model.vision is not None
        grammar = self._grammar if number // 4 % 2 else None
        content: Any = text
        if has_image:
            content = [{"type": "text", "text": text}, {"type": "image", "image": _picture(number)}]
        seen = self._sight.see([{"role": "user", "content": content}])
        shown = self._tokenizer.render_chat(self._sight.shown(self._tokenizer, seen))
        tokens, images = self._sight.encode(self._tokenizer, shown, seen)
        adapter = self._adapters[number // 2 % len(self._adapters)] if self._adapters else None
        return self._intake.request(
            request_id=f"{MIXED}-{self._num_runs}-{number}",
            prompt_token_ids=tokens,
            params=SamplingParams(
                temperature=0.0, max_tokens=output_tokens, ignore_eos=grammar is None
            ),
            cache_salt=f"{MIXED} {self._num_runs} {number}",  # as in plain ones, nothing is found
            adapters=[(adapter, 1.0)] if adapter is not None and number % 2 else [],
            grammar=grammar,
            images=images,
        )

    def _alike(self, asked: Sequence[Request], mixed: Answered, seed: int) -> list[Request]:
        """Plain requests of the same lengths."""
        made = []
        for number, (one, num_tokens) in enumerate(zip(asked, mixed.num_tokens, strict=True)):
            shape = Shape(batch_size=1, input_tokens=len(one.prompt_token_ids), output_tokens=0)
            (tokens,) = random_token_prompts(
                shape,
                vocab_size=self._tokenizer.vocab_size,
                avoid=(*self._config.model.eos_token_ids, *self._image_tokens()),
                seed=seed * len(asked) + number,
            )
            made.append(
                replace(
                    self._intake.request(
                        request_id=one.request_id.replace(MIXED, PLAIN),
                        prompt_token_ids=tokens,
                        params=SamplingParams(
                            temperature=0.0, max_tokens=num_tokens, ignore_eos=True
                        ),
                        cache_salt=one.cache_salt.replace(MIXED, PLAIN),
                    ),
                    speculation=Speculation(enabled=False),
                )
            )
        return made

    def _image_tokens(self) -> tuple[int, ...]:
        vision = self._config.model.vision
        return () if vision is None else (vision.image_token_id,)

    def _answer(self, asked: Sequence[Request]) -> Answered:
        engine, before = self._engine, self._engine.stats
        counts = {request.request_id: 0 for request in asked}
        began = time.perf_counter()
        for request in asked:
            engine.add(request)
        while engine.has_unfinished:
            for event in engine.step():
                if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise InternalError(f"a measured request ended early: {event.error}")
                counts[event.request_id] += len(event.token_ids)
        seconds, after = time.perf_counter() - began, engine.stats
        return Answered(
            num_tokens=tuple(counts.values()),
            seconds=seconds,
            encoder_s=after.encoder_seconds - before.encoder_seconds,
            rows={n: getattr(after, n) - getattr(before, n) for n in ROW_KINDS.values()},
        )


def _compiled(started: Started) -> CompiledGrammar:
    from plait.structured.compiler import Compiler
    from plait.structured.spec import GrammarKind, GrammarSpec
    from plait.structured.vocabulary import Vocabulary

    vocabulary = Vocabulary.of_model(started.tokenizer, started.engine.config.model)
    return Compiler(vocabulary).compile(GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=SCHEMA))


def _picture(seed: int) -> bytes:
    """A PNG file of one colour with a square of another."""
    from PIL import Image

    rng = random.Random(seed)
    image = Image.new("RGB", (96, 96), (rng.randrange(256), 200, 90))
    image.paste((90, rng.randrange(256), 40), (20, 30, 60, 70))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def table(result: dict[str, Any]) -> Table:
    """Both rates, their ratio, and what the rows of the mixed ones were."""
    shown = Table(
        "",
        Column("tok/s", justify="right"),
        caption="output tokens per second, prompts included, encoding of images left out",
    )
    for name, rate in result["tokens_per_s"].items():
        shown.add_row(name, f"{rate:.1f}")
    shown.add_row("[bold]× plain[/]", f"[bold]{result['ratio']:.2f}[/]")
    shown.add_section()
    for name, count in result["rows"].items():
        shown.add_row(name.replace("_", " "), f"{count:,}")
    return shown
