"""Engines whose answers must obey grammars, on a model that would rather not.

The vocabulary is that of `support.grammars`: bytes, two end tokens, specials, longer tokens. What
the model prefers is a function of the tokens that a row sees, read back through the block tables.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jsonschema import Draft202012Validator
from support.drafting import FREE_ROWS, speculator
from support.grammars import END, OTHER_END, SPECIAL, WIDTH, vocabulary
from support.history_executor import HistoryExecutor, engine_config, logits_after

from plait.platform.core import CompiledGrammar, Event, FinishReason, Request, SamplingParams
from plait.platform.engine import Engine
from plait.structured.compiler import Compiler
from plait.structured.matcher import MatcherStore
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.strand import GrammarStrand

Logits = Callable[[list[int]], np.ndarray]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "abc": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["ab", "abc", "red"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["abc", "kind", "list"],
    "additionalProperties": False,
}
BOUNDED = {  # lengths: llguidance takes it
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1, "maxLength": 3}},
    "required": ["text"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": {"type": "string"}, "minItems": 2}
REGEX = "[ab]{2}-(ab|abc){1,3}"
CHOICES = ["ab", "abc", "ab c", "日本"]


@functools.cache
def _compiler() -> Compiler:
    return Compiler(vocabulary())


def compiled(kind: GrammarKind, content: object, **options: Any) -> CompiledGrammar:
    return _compiler().compile(GrammarSpec(kind=kind, content=content, options=options))


@functools.cache
def grammars() -> dict[str, CompiledGrammar]:
    """One of each kind, of both backends."""
    return {
        "schema": compiled(GrammarKind.JSON_SCHEMA, SCHEMA),
        "bounded": compiled(GrammarKind.JSON_SCHEMA, BOUNDED),
        "endless": compiled(GrammarKind.JSON_SCHEMA, ENDLESS),
        "regex": compiled(GrammarKind.REGEX, REGEX),
        "choice": compiled(GrammarKind.CHOICE, CHOICES),
    }


def is_valid(name: str, text: str) -> bool:
    import re

    if name == "regex":
        return re.fullmatch(REGEX, text) is not None
    if name == "choice":
        return text in CHOICES
    schema = {"schema": SCHEMA, "bounded": BOUNDED, "endless": ENDLESS}[name]
    return Draft202012Validator(schema).is_valid(json.loads(text))


def text_of(tokens: Iterable[int]) -> str:
    pieces = vocabulary().pieces
    return b"".join(pieces[t] for t in tokens if t not in vocabulary().special_ids).decode()


# --- models ------------------------------------------------------------------------------------


def hashed(history: list[int]) -> np.ndarray:
    """Random logits, a function of the history."""
    row = logits_after(history).numpy()
    return np.random.default_rng(abs(int(row[0] * 1e6))).normal(size=WIDTH).astype(np.float32) * 2


def hostile(history: list[int]) -> np.ndarray:
    """Prefers ends, specials, padding, control characters and whitespace, then digits."""
    row = hashed(history)
    row[[END, OTHER_END, SPECIAL]] += 60
    row[vocabulary().pieces.__len__() :] += 50
    row[list(range(32))] += 40
    row[[ord(" "), ord('"'), ord("\\")]] += 30
    row[[ord(c) for c in "0123456789eE.-"]] += 20
    return row


class ScriptedExecutor(HistoryExecutor):
    """`HistoryExecutor` with logits of one's own."""

    def __init__(self, config: Any, logits: Logits) -> None:
        super().__init__(config)
        self._logits_of = logits

    def _row_logits(self, batch: Any, span: int, position: int) -> torch.Tensor:
        return torch.from_numpy(self._logits_of(self._read(batch, 0, span, 0, position)))


def make_engine(
    logits: Logits = hashed,
    *,
    store: MatcherStore | None = None,
    force: bool = True,
    profile: Mapping[int, float] = FREE_ROWS,
    **config: Any,
) -> tuple[Engine, GrammarStrand]:
    made = engine_config(**config)
    model = replace(made.model, vocab_size=WIDTH, eos_token_ids=(END, OTHER_END))
    made = replace(made, model=model)
    strand = GrammarStrand(vocabulary, store=store)
    executor = ScriptedExecutor(made, logits)
    if not force:
        return Engine(made, executor, None, strands=[strand]), strand
    drafter = speculator(profile, constraints=strand)
    return Engine(made, executor, None, strands=[strand, drafter], drafter=drafter), strand


# --- requests ----------------------------------------------------------------------------------


def request(
    request_id: str,
    grammar: CompiledGrammar | None = None,
    *,
    prompt: tuple[int, ...] = tuple(b"Give:"),
    priority: int = 0,
    **params: Any,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**({"max_tokens": 40, "temperature": 0.0} | params)),
        priority=priority,
        grammar=grammar,
    )


def drawn(seed: int, count: int) -> list[Request]:
    """Requests of all kinds with all manner of options; ids tell the grammar."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        name = rng.choice([*grammars(), "free"])
        found.append(
            request(
                f"{name}-{i}",
                grammars().get(name),
                prompt=(*b"Give the same prefix: "[: rng.randrange(4, 23)], i % 5),
                max_tokens=rng.choice([3, 12, 48]),
                temperature=rng.choice([0.0, 0.7, 1.5]),
                seed=i,
                n=rng.choice([1, 1, 3]),
                top_p=rng.choice([1.0, 1.0, 0.8]),
                top_k=rng.choice([0, 0, 5]),
                repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
                frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
                min_tokens=rng.choice([0, 0, 3]),
                logprobs=rng.choice([None, None, 2]),
                stop_token_ids=rng.choice([(), (), (ord("b"),)]),
            )
        )
    return found


Answer = tuple[tuple[int, ...], str, tuple[object, ...]]


def answers(events: Iterable[Event]) -> dict[tuple[str, int], Answer]:
    """Tokens, how it ended, logprobs, of each answer."""
    found: dict[tuple[str, int], Answer] = {}
    for event in events:
        key = (event.request_id, event.index)
        tokens, end, logprobs = found.get(key, ((), "", ()))
        assert end == "", "told after its end"
        end = f"{event.finish_reason}:{event.stop_reason}" if event.finish_reason else ""
        found[key] = (tokens + event.token_ids, end, logprobs + event.logprobs)
    return found


def drain(engine: Engine, strand: GrammarStrand) -> list[Event]:
    """Step until nothing is left; everything is checked after each step."""
    events: list[Event] = []
    while engine.has_unfinished:
        events += engine.step()
        engine.scheduler.check_integrity()
    assert_idle(engine, strand)
    return events


def assert_idle(engine: Engine, strand: GrammarStrand) -> None:
    assert engine.stats.kv_usage == 0
    assert not strand.busy
    assert not strand._held, "matchers have leaked"


def check_finished(events: list[Event]) -> int:
    """Every constrained answer that stopped by itself is valid; returns how many did."""
    num_finished = 0
    for (request_id, _), (tokens, end, _) in answers(events).items():
        name = request_id.split("-")[0]
        if name == "free":
            continue
        assert end.split(":")[0] in (FinishReason.STOP, FinishReason.LENGTH), end
        if end == f"{FinishReason.STOP}:None":
            assert is_valid(name, text_of(tokens)), text_of(tokens)
            num_finished += 1
    return num_finished
