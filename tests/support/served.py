"""Real engines on tiny or embedded models, with grammars; requests of all kinds for them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from support.drafting import draft_whatever_it_costs

from plait.platform.config import Options
from plait.platform.core import CompiledGrammar, Event, Request, SamplingParams
from plait.platform.intake import Intake
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
