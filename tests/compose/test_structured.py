"""Constrained answers of real models: valid, and the same in any company, forced drafts or not."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from support.drafting import accepted, draft_whatever_it_costs

from plait.platform.config import Options
from plait.platform.core import CompiledGrammar, Event, FinishReason, Request, SamplingParams
from plait.platform.drafting import NoDrafts
from plait.platform.errors import BadRequest, Unsupported
from plait.platform.intake import Intake
from plait.platform.messages import Add, ToEngine
from plait.platform.start import Started, start_engine
from plait.structured.compiler import Compiler
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.strand import GrammarStrand
from plait.structured.vocabulary import Vocabulary

MAX_MODEL_LEN = 256
COUNT = 20


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


PERSON = closed(
    name={"type": "string"},
    age={"type": "integer", "minimum": 0, "maximum": 150},
    favourite_colour={"enum": ["red", "green", "blue"]},
)
SHORT = closed(  # lengths: llguidance takes it
    title={"type": "string", "minLength": 2, "maxLength": 8},
    tags={"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
)
DATE = r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d"
NAMES = ["positive", "negative", "neither nor", "ünklar"]
SPECS = {
    "person": GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=PERSON),
    "short": GrammarSpec(kind=GrammarKind.JSON_SCHEMA, content=SHORT),
    "date": GrammarSpec(kind=GrammarKind.REGEX, content=DATE),
    "choice": GrammarSpec(kind=GrammarKind.CHOICE, content=NAMES),
}


def is_valid(name: str, text: str) -> bool:
    if name == "date":
        return re.fullmatch(DATE, text) is not None
    if name == "choice":
        return text in NAMES
    schema = {"person": PERSON, "short": SHORT}[name]
    return Draft202012Validator(schema).is_valid(json.loads(text))


class Served:
    """An engine, and grammars for its vocabulary."""

    def __init__(self, model: Path | None, **options: Any) -> None:
        self.started: Started = start_engine(
            Options(
                model=None if model is None else str(model),
                dtype="float32" if model is not None else "auto",
                max_model_len=MAX_MODEL_LEN,
                max_num_queued_reqs=1000,
                num_threads=1,
                progress=False,
                **options,
            )
        )
        self.engine = self.started.engine
        draft_whatever_it_costs(self.engine)
        self.grammars = grammars_of(self.started)
        self.intake = Intake(self.engine.config, self.started.tokenizer)

    @property
    def strand(self) -> GrammarStrand:
        (strand,) = (s for s in self.engine._strands._strands if isinstance(s, GrammarStrand))
        return strand

    def request(self, name: str, number: int, prompt: list[int], **params: Any) -> Request:
        return self.intake.request(
            request_id=f"{name}-{number}",
            prompt_token_ids=prompt,
            params=SamplingParams(**params),
            grammar=self.grammars.get(name),
        )

    def drain(self) -> list[Event]:
        events: list[Event] = []
        while self.engine.has_unfinished:
            events += self.engine.step()
            self.engine.scheduler.check_integrity()
        assert not self.strand._held
        assert self.engine.stats.kv_usage == 0
        return events


_GRAMMARS: dict[str, dict[str, CompiledGrammar]] = {}


def grammars_of(started: Started) -> dict[str, CompiledGrammar]:
    vocabulary = Vocabulary.of_model(started.tokenizer, started.engine.config.model)
    if vocabulary.digest not in _GRAMMARS:
        compiler = Compiler(vocabulary)
        made = {name: compiler.compile(spec) for name, spec in SPECS.items()}
        assert {grammar.backend for grammar in made.values()} == {"xgrammar", "llguidance"}
        _GRAMMARS[vocabulary.digest] = made
    return _GRAMMARS[vocabulary.digest]


def mixed(served: Served) -> list[Request]:
    """All kinds, with options of every sort; half with a common beginning."""
    rng = random.Random(0)
    common = [rng.randrange(3, 250) for _ in range(60)]
    found = []
    for i in range(COUNT):
        name = (*SPECS, "free")[i % 5]
        prompt = common[: rng.randrange(60)] if i % 2 else []
        prompt = prompt + [rng.randrange(3, 250) for _ in range(rng.randrange(1, 20))]
        found.append(
            served.request(
                name,
                i,
                prompt,
                max_tokens=rng.choice([8, 64, 64]),
                temperature=rng.choice([0.0, 0.8, 1.5]),
                seed=i,
                n=3 if i % 7 == 0 else 1,
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 30]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                presence_penalty=rng.choice([0.0, 0.5]),
                min_tokens=rng.choice([0, 5]),
                stop=rng.choice([(), (), ("7",)]),
                logprobs=rng.choice([None, 2]),
            )
        )
    return found


Answer = tuple[tuple[int, ...], str, str, tuple[object, ...]]


def answers(events: list[Event]) -> dict[tuple[str, int], Answer]:
    found: dict[tuple[str, int], Answer] = {}
    for event in events:
        ids, text, _, logprobs = found.get((event.request_id, event.index), ((), "", "", ()))
        found[event.request_id, event.index] = (
            ids + event.token_ids,
            text + event.text,
            f"{event.finish_reason}:{event.stop_reason}",
            logprobs + event.logprobs,
        )
    return found


def check(found: dict[tuple[str, int], Answer]) -> int:
    """Every answer that stopped by itself is valid, every other says why; how many are valid."""
    num_valid = 0
    for (request_id, _), (_, text, end, _) in found.items():
        name = request_id.split("-")[0]
        assert end in ("stop:None", "stop:7", "length:None"), end
        if name != "free" and end == "stop:None":
            assert is_valid(name, text), text
            num_valid += 1
    return num_valid


@cache
def alone(path: Path) -> dict[tuple[str, int], Answer]:
    """The reference: each by itself, no forced drafts, nothing cached."""
    served = Served(path, enable_prefix_caching=False, kv_cache_bytes=32 << 20)
    served.engine._drafter = NoDrafts()
    events: list[Event] = []
    for request in mixed(served):
        served.engine.add(request)
        events += served.drain()
    return answers(events)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_any_mix_equals_alone(checkpoint: Callable[[str], Path], rows: int, caching: bool) -> None:
    path = checkpoint("llama")
    served = Served(
        path,
        max_num_batched_tokens=rows,
        max_num_seqs=min(24, rows),
        enable_prefix_caching=caching,
        kv_cache_bytes=32 << 20,
    )
    rng, pending, events = random.Random(rows), mixed(served), []
    while pending:
        served.engine.add(pending.pop(rng.randrange(len(pending))))
        events += served.engine.step()
    events += served.drain()
    assert answers(events) == alone(path)
    assert check(alone(path)) > 8
    if rows > 1:  # where one row is all there is, there is none for drafts
        assert accepted(served.engine.stats, "grammar") > 0


@pytest.mark.parametrize("force", [True, False])
def test_parked_answers_go_on_where_they_were(
    checkpoint: Callable[[str], Path], force: bool
) -> None:
    path = checkpoint("llama")
    plenty = Served(path, kv_cache_bytes=32 << 20).engine.config.cache
    per_block = sum(g.bytes_per_block(plenty.block_size, 4) for g in plenty.groups)
    served = Served(
        path,
        max_num_batched_tokens=64,
        kv_cache_bytes=per_block * (MAX_MODEL_LEN // plenty.block_size + 3),
    )
    if not force:
        served.engine._drafter = NoDrafts()
    for request in mixed(served):
        served.engine.add(request)
    assert answers(served.drain()) == alone(path)
    assert served.engine.stats.num_preemptions > 0


def test_a_constrained_request_crosses_the_socket(checkpoint: Callable[[str], Path]) -> None:
    served = Served(checkpoint("llama"), kv_cache_bytes=32 << 20)
    request = served.request("person", 0, [5, 6], max_tokens=200, temperature=1.0, seed=1)
    frame = msgspec.msgpack.encode(Add(request=request))
    arrived = msgspec.msgpack.Decoder(ToEngine).decode(frame).request
    assert arrived == request
    served.engine.add(arrived)
    answer = answers(served.drain())["person-0", 0]
    assert check({("person-0", 0): answer}) == (answer[2] == "stop:None")


def test_what_a_grammar_cannot_go_with_is_refused_by_name(
    checkpoint: Callable[[str], Path],
) -> None:
    import dataclasses

    served = Served(checkpoint("llama"), kv_cache_bytes=32 << 20)
    with pytest.raises(BadRequest, match="ignore_eos") as refused:
        served.request("person", 0, [5], max_tokens=5, ignore_eos=True)
    assert refused.value.param == "ignore_eos"
    config = served.engine.config
    endless = dataclasses.replace(config, model=dataclasses.replace(config.model, eos_token_ids=()))
    with pytest.raises(Unsupported, match="no end token"):
        Intake(endless, served.started.tokenizer).request(
            request_id="a",
            prompt_token_ids=[5],
            params=SamplingParams(),
            grammar=served.grammars["person"],
        )


# --- the embedded model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm() -> Served:
    return Served(None, kv_cache_bytes=64 << 20)


def asked(served: Served, seed: int) -> dict[tuple[str, int], Answer]:
    encode = served.started.tokenizer.encode
    for i, name in enumerate((*SPECS, "free")):
        prompt = encode(f"A {name} in JSON with title, name, age and favourite_colour: ")
        served.engine.add(
            served.request(
                name, i, prompt, max_tokens=48, temperature=(0.0, 1.5)[seed % 2], seed=seed, n=2
            )
        )
    return answers(served.drain())


@pytest.mark.parametrize("seed", [0, 1])
def test_the_embedded_model_answers_validly_and_forced_drafts_change_nothing(
    smollm: Served, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = smollm.engine.stats
    drafted = asked(smollm, seed)
    middle = smollm.engine.stats
    monkeypatch.setattr(smollm.engine, "_drafter", NoDrafts())
    assert asked(smollm, seed) == drafted
    assert check(drafted) >= 4
    assert accepted(middle, "grammar") > accepted(before, "grammar")
    assert {end for _, _, end, _ in drafted.values()} <= {
        f"{FinishReason.STOP}:None",
        f"{FinishReason.LENGTH}:None",
    }
