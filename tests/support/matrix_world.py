"""Requests of every combination of adapters, images, drafts and grammars, and engines for them.

One tiny vision-language model with two adapters (A changes the language model and its head, B the
tower, the projector and one layer kind more) and a draft model that equals its language model.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from support.drafting import Always, EagerEconomy, set_economy
from support.peft_adapters import fill_adapter, quiet
from support.served import closed
from support.tiny_models import make_tokenizer
from support.tiny_vision import make_vision_model
from support.vision_prompts import make_prompt
from support.vision_served import make_served_checkpoint, request_of
from transformers import LlamaForCausalLM

from plait.adapters.strand import AdapterStrand
from plait.platform.config import Options
from plait.platform.core import (
    AdapterUse,
    CompiledGrammar,
    Event,
    FinishReason,
    Request,
    Sequence,
    Speculation,
)
from plait.platform.drafting import NoDrafts
from plait.platform.messages import LoadAdapter
from plait.platform.start import start_engine
from plait.speculative.source import Draft, Want
from plait.speculative.speculator import Speculator
from plait.structured.compiler import Compiler
from plait.structured.reply import ReplyPlan
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.strand import GrammarStrand
from plait.structured.tools.formats import HERMES
from plait.structured.tools.parser import Reply, ReplyParser
from plait.structured.tools.request import read_tools
from plait.structured.vocabulary import Vocabulary
from plait.vision.strand import VisionStrand

FAMILY = "llava"
MAX_MODEL_LEN = 160
IMAGE = (2, 2)  # 16 rows
NUM_ROWS = 16

ADAPTERS = ("", "A", "B", "AB")
IMAGES = (0, 1, 2)
DRAFTS = ("none", "model", "ngram", "forced")
GRAMMARS = ("", "json", "regex", "tool")
VARIANTS = ("stream", "n", "seed")

TARGETS = {
    "A": r".*language_model.*\.(k_proj|v_proj|down_proj)|lm_head",
    "B": r".*vision_tower.*(q_proj|fc1)|.*multi_modal_projector.linear_1|.*language_model.*o_proj",
}
GENERATIONS = {name: f"{i:064x}" for i, name in enumerate(TARGETS, start=1)}
SCALES = {"A": 1.0, "B": 0.5}

SCHEMA = closed(ok={"type": "boolean"}, hue={"enum": ["red", 23]})
REGEX = r"(red|green): \d{2}-[a-f]{2,4}!"
TOOL = {"type": "function", "function": {"name": "go", "parameters": closed(up={"enum": [1, 2]})}}


@dataclass(frozen=True)
class Cell:
    """One combination."""

    number: int  # of what it asks
    adapters: str
    images: int
    draft: str
    grammar: str
    variant: str

    @property
    def name(self) -> str:
        """Its request's id."""
        return f"{self.adapters or 'base'}/{self.images}/{self.draft}/{self.grammar or 'free'}"

    @property
    def has_all(self) -> bool:
        """Whether it uses all four."""
        return bool(self.adapters and self.images and self.draft != "none" and self.grammar)


def cells() -> list[Cell]:
    """All of them; ways to be sampled are spread evenly over each pair of the others.

    Cells that differ in drafts alone ask the same, so one answer is right for all of these.
    """
    found: list[Cell] = []
    axes = (ADAPTERS, IMAGES, GRAMMARS)
    for number, places in enumerate(itertools.product(*(range(len(axis)) for axis in axes))):
        adapters, images, grammar = (axis[at] for axis, at in zip(axes, places, strict=True))
        variant = VARIANTS[sum(places) % len(VARIANTS)]
        found += [
            Cell(number, str(adapters), int(images), draft, str(grammar), variant)
            for draft in DRAFTS
        ]
    return found


class World:
    """The checkpoints, written once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = root / "target"
        self.model = make_served_checkpoint(FAMILY, self.target)
        self.draft = root / "draft"
        language = LlamaForCausalLM(self.model.config.text_config)
        language.model.load_state_dict(self.model.model.language_model.state_dict())
        language.lm_head.load_state_dict(self.model.lm_head.state_dict())
        language.save_pretrained(self.draft)
        make_tokenizer().save_pretrained(self.draft)
        for seed, (name, pattern) in enumerate(TARGETS.items()):
            _write_adapter(root / name, pattern, seed=seed)


def _write_adapter(directory: Path, pattern: str, *, seed: int) -> None:
    from peft import LoraConfig, get_peft_model

    with quiet():
        config = LoraConfig(r=4, lora_alpha=8, target_modules=pattern)
        adapted = get_peft_model(make_vision_model(FAMILY), config)
        fill_adapter(adapted, seed=seed, strength=0.4)
        adapted.save_pretrained(directory)


# --- sources of drafts, by cell ------------------------------------------------------------------


class _Only:
    """A source, or what grammars force, for the cells alone that ask for it."""

    def __init__(self, inner: Any, draft: str) -> None:
        self._inner = inner
        self._draft = draft

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _is_for(self, sequence: Sequence) -> bool:
        return f"/{self._draft}/" in sequence.request.request_id

    def takes(self, sequence: Sequence) -> bool:
        """Of a `ModelSource`."""
        return self._is_for(sequence) and self._inner.takes(sequence)

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        """Of `Constraints`."""
        return self._inner.forced(sequence, limit) if self._is_for(sequence) else []

    def propose(self, wants: Any) -> Any:
        """Of a `TextSource` for one, of a `ModelSource` for several that it takes."""
        if isinstance(wants, Want):
            found: Draft | None = None
            if self._is_for(wants.sequence):
                found = self._inner.propose(wants)
            return found
        return self._inner.propose(wants)


# --- the engine ----------------------------------------------------------------------------------


class Woven:
    """An engine with both adapters and grammars, on one executor and type."""

    def __init__(self, world: World, *, by_cell: bool = True, **options: Any) -> None:
        given = {"kv_cache_bytes": 8 << 20, "adapter_memory_bytes": 4 << 20, **options}
        self.world = world
        self.started = start_engine(
            Options(
                model=str(world.target),
                draft_model=str(world.draft),
                max_model_len=MAX_MODEL_LEN,
                max_num_queued_reqs=1000,
                max_draft_tokens=5,
                num_threads=1,
                packed_cache="off",
                progress=False,
                **given,
            )
        )
        self.engine = self.started.engine
        drafter = self.engine.drafter
        assert isinstance(drafter, Speculator)
        self.drafter = drafter
        set_economy(drafter, EagerEconomy())
        assert drafter._model is not None
        drafter._model._following = Always()
        if by_cell:
            candidates = drafter._candidates
            candidates._texts = tuple(_Only(text, "ngram") for text in candidates._texts)
            candidates._constraints = _Only(candidates._constraints, "forced")
            drafter._model._source = _Only(drafter._model._source, "model")
        self.uses = {name: self._load(name) for name in TARGETS}
        self.grammars = self._grammars()

    def without_drafts(self) -> Woven:
        """The same, that drafts nothing."""
        self.engine._drafter = NoDrafts()
        return self

    def _load(self, name: str) -> AdapterUse:
        generation, directory = GENERATIONS[name], str(self.world.root / name)
        self.engine.load_adapter(LoadAdapter(generation=generation, directory=directory))
        while not (results := self.engine.take_adapter_results()):
            self.engine.step()
        info = results[0].info
        assert info is not None, results[0].error
        return AdapterUse(
            generation=generation,
            scale=SCALES[name],
            kv_digest=info.kv_digest,
            tower_digest=info.tower_digest,
        )

    def _grammars(self) -> dict[str, CompiledGrammar]:
        tokenizer = self.started.tokenizer
        compiler = Compiler(Vocabulary.of_model(tokenizer, self.engine.config.model))
        plan = ReplyPlan.of(tokenizer, None, read_tools([TOOL], "required", parallel=False))
        assert plan is not None
        specs = {
            "json": GrammarSpec(
                kind=GrammarKind.JSON_SCHEMA, content=SCHEMA, options={"any_whitespace": False}
            ),
            "regex": GrammarSpec(kind=GrammarKind.REGEX, content=REGEX),
            "tool": plan.grammar(begins=False),
        }
        return {name: compiler.compile(spec) for name, spec in specs.items()}

    def strand(self, kind: type) -> Any:
        """The strand of a feature."""
        (found,) = (s for s in self.engine._strands._strands if isinstance(s, kind))
        return found

    def request(self, cell: Cell) -> Request:
        """What a cell asks. Half of all have one of few prompts, so that they share its blocks."""
        number = cell.number
        tail = 7 + number % 11 if number % 2 else 9
        layouts: dict[int, list[Any]] = {
            0: [20 + tail],
            1: [9, IMAGE, tail],
            2: [4, IMAGE, 3, IMAGE, tail],
        }
        seed = number // 2 % 2  # two sets of images and texts
        prompt = make_prompt(FAMILY, self.world.model, layouts[cell.images], seed=seed)
        prompt.tokens += prompt.tokens[-6:] * 2  # what n-grams find
        params: dict[str, Any] = {"max_tokens": 80 if cell.grammar else 12, "logprobs": 1}
        if cell.variant != "stream":
            params |= {"temperature": 0.9, "seed": number, "n": 2 if cell.variant == "n" else 1}
        if cell.variant == "seed":
            params |= {"top_p": 0.95, "repetition_penalty": 1.1}
        return request_of(
            self.world.model,
            prompt,
            cell.name,
            fields={
                "adapters": tuple(self.uses[name] for name in cell.adapters),
                "grammar": self.grammars.get(cell.grammar),
                "speculation": Speculation(enabled=cell.draft != "none"),
                # Blocks and embeddings are shared with those of one other kind of drafts.
                "cache_salt": "" if cell.draft in ("none", "model") else "another",
            },
            ignore_eos=not cell.grammar,
            **params,
        )

    def requests(self, chosen: Iterable[Cell] | None = None) -> list[Request]:
        """One of each cell."""
        return [self.request(cell) for cell in (cells() if chosen is None else chosen)]

    def alone(self, chosen: Iterable[Cell]) -> dict[tuple[str, int], Answer]:
        """Each by itself; cells that ask the same, once for all."""
        found: dict[tuple[str, int], Answer] = {}
        asked: dict[int, list[Answer]] = {}
        for cell in chosen:
            if cell.number not in asked:
                self.engine.add(self.request(cell))
                asked[cell.number] = list(answers(self._drain()).values())
            found |= {(cell.name, i): answer for i, answer in enumerate(asked[cell.number])}
        self.check_nothing_left()
        return found

    def together(self, asked: list[Request], seed: int) -> dict[tuple[str, int], Answer]:
        """All in running batches: they come at random moments, and strangers come and go."""
        rng, engine = random.Random(seed), self.engine
        pending, events, strangers = list(asked), [], 0
        rng.shuffle(pending)
        while pending or engine.has_unfinished:
            for _ in range(min(len(pending), rng.randrange(4))):
                engine.add(pending.pop())
            if pending and rng.random() < 0.1:
                strangers += 1
                engine.add(replace(pending[0], request_id=f"{pending[0].request_id}+{strangers}"))
            for event in engine.step():
                if "+" not in event.request_id:
                    events.append(event)
                elif event.finish_reason is None and rng.random() < 0.3:
                    engine.abort(event.request_id)
            if engine.stats.num_steps % 7 == 0:
                engine.scheduler.check_integrity()
        self.check_nothing_left()
        return answers(events)

    def _drain(self) -> list[Event]:
        events: list[Event] = []
        while self.engine.has_unfinished:
            events += self.engine.step()
        return events

    def check_nothing_left(self) -> None:
        """No block, pin, embedding in use, grammar state or draft is left; no grammar failed."""
        engine, stats = self.engine, self.engine.stats
        engine.scheduler.check_integrity()
        assert stats.kv_usage == 0
        assert stats.grammar_faults == 0
        engine._strands.begin(0.0)  # lets go of images that were consumed
        engine._strands.check_integrity(())
        assert not self.strand(GrammarStrand)._held
        assert not self.strand(VisionStrand)._held
        adapters = self.strand(AdapterStrand)
        assert not adapters._leases
        assert len(adapters._claims) == 0
        assert not self.drafter._states
        assert self.drafter._model is not None
        self.drafter._model._source.check_integrity(())

    def unload(self) -> None:
        """Drop all adapters; nothing of them stays."""
        for generation in GENERATIONS.values():
            self.engine.drop_adapter(generation)
        self.engine.step()
        stats = self.engine.stats
        assert (stats.adapter_device_bytes, stats.adapter_host_bytes) == (0, 0)


Answer = tuple[tuple[int, ...], str, str, tuple[object, ...]]


def answers(events: Iterable[Event]) -> dict[tuple[str, int], Answer]:
    """Tokens, text, how it ended and log-probabilities of each."""
    found: dict[tuple[str, int], Answer] = {}
    for event in events:
        who = event.request_id, event.index
        ids, text, end, logprobs = found.get(who, ((), "", "", ()))
        assert not end, "told after its end"
        if event.finish_reason is not None:
            end = str(event.finish_reason)
            assert event.finish_reason is not FinishReason.ERROR, event.error
        found[who] = (ids + event.token_ids, text + event.text, end, logprobs + event.logprobs)
    return found


def is_valid(grammar: str, text: str) -> bool:
    """Whether a whole answer obeys its grammar."""
    if grammar == "regex":
        return re.fullmatch(REGEX, text) is not None
    if grammar == "json":
        return Draft202012Validator(SCHEMA).is_valid(json.loads(text))
    parser, reply = ReplyParser(HERMES), Reply()
    for delta in (*parser.feed(text), *parser.end()):
        reply.add(delta)
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    (call,) = reply.calls
    return call.name == "go" and Draft202012Validator(schema).is_valid(json.loads(call.arguments))
