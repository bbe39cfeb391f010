"""Rejection sampling end to end: a draft model draws, the engine's steps verify.

What comes out is compared with the exact distribution of all answers of a model of ten tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.draft_engine import options
from support.drafting import (
    DEAR_ROWS,
    FREE_ROWS,
    EagerEconomy,
    FixedCost,
    accepted,
    draft_whatever_it_costs,
    set_economy,
    verified,
)
from support.eagle_heads import HeadShape, head_tensors, write_head
from support.history_executor import engine_config
from support.table_model import (
    NUM_TOKENS,
    TableExecutor,
    joint,
    marginal,
    row,
    surprise,
    table,
    ten_tokens,
    views,
)

from plait import LLM, SamplingParams, StructuredOutputs
from plait.platform.core import CompiledGrammar, Event, Request
from plait.platform.engine import Engine
from plait.platform.errors import ConfigError
from plait.platform.logits.rejecting import RejectingSampler
from plait.platform.start import start_engine
from plait.speculative import rejection
from plait.speculative.draft_model import DraftBounds, DraftModel
from plait.speculative.economy import Economy
from plait.speculative.lookup import SequenceLookup
from plait.speculative.rejection import is_drawn
from plait.speculative.source import Sources
from plait.speculative.speculator import Speculator

Checkpoint = Callable[[str], Path]
PROMPT = [4, 7]
TARGET = table(1)
DRAFT = table(2, near=TARGET)
FAR = table(5)
LENGTH = 4  # a token without drafts, then two drafts and one token more, if all hold
NUM_SAMPLES = 10_240
# Standard deviations: by chance once in a hundred thousand times.
CRITICAL = 4.3


class World:
    """An engine of the target's table whose drafts are drawn from the draft's."""

    def __init__(
        self,
        *,
        draft: np.ndarray | None = DRAFT,
        max_tokens: int = 2,
        economy: Economy | None = None,
        texts: bool = False,
        **config: Any,
    ) -> None:
        bounds = {"num_blocks": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512}
        resolved = ten_tokens(engine_config(**(bounds | config), prefix_caching=False))
        sampler = RejectingSampler(NUM_TOKENS, (2,))
        model = None
        if draft is not None:
            model = DraftModel(
                TableExecutor(resolved, draft),
                DraftBounds(
                    block_size=resolved.cache.block_size,
                    group=0,
                    num_blocks=resolved.cache.groups[0].num_blocks,
                    num_scratch=64,
                    vocab_size=NUM_TOKENS,
                    eos_token_ids=(2,),
                    max_rows=512,
                ),
                choose=sampler.choose,
                draw=RejectingSampler(NUM_TOKENS, (2,)).draw,
            )
        self.speculator = Speculator(
            economy or EagerEconomy(),
            Sources(texts=(SequenceLookup(NUM_TOKENS),) if texts else (), model=model),
            max_tokens=max_tokens,
            vocab_size=NUM_TOKENS,
            draws=True,
        )
        self.engine = Engine(
            resolved,
            TableExecutor(resolved, TARGET),
            None,
            strands=[self.speculator],
            drafter=self.speculator,
            sampler=sampler,
        )
        self.ends: list[Event] = []

    def run(self, *requests: Request) -> Iterator[list[int]]:
        """The answers, as they end."""
        answers: dict[tuple[str, int], list[int]] = defaultdict(list)
        for request in requests:
            self.engine.add(request)
        while self.engine.has_unfinished:
            for event in self.engine.step():
                assert event.error is None, event.error
                answers[event.request_id, event.index] += event.token_ids
                if event.finish_reason is not None:
                    self.ends.append(event)
                    yield answers.pop((event.request_id, event.index))
        self.engine.scheduler.check_integrity()

    def counts(self, num: int, **params: Any) -> np.ndarray:
        """How often each answer came, of `num`."""
        length = params.get("max_tokens", LENGTH)
        counts = np.zeros((NUM_TOKENS,) * length)
        for tokens in self.run(*asked(num, **params)):
            counts[tuple(tokens)] += 1
        assert counts.sum() == num
        return counts

    @property
    def num_drafts(self) -> int:
        return sum(end.num_draft_tokens for end in self.ends)

    @property
    def num_held(self) -> int:
        return sum(end.num_accepted_tokens for end in self.ends)


def asked(num: int, **params: Any) -> Iterator[Request]:
    for i in range(num // 16):
        yield Request(
            request_id=str(i),
            prompt_token_ids=tuple(PROMPT),
            params=with_params(n=16, seed=i, **params),
        )


def with_params(**params: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": LENGTH, "ignore_eos": True} | params))


def worst(counts: np.ndarray, **params: Any) -> float:
    """The greatest surprise of all marginals, pairs, and whole answers."""
    exact = joint(TARGET, PROMPT, counts.ndim, with_params(**params))
    looks = [*views(counts.ndim), tuple(range(counts.ndim))]
    return max(surprise(marginal(counts, look), marginal(exact, look)) for look in looks)


PENALTIES: dict[str, Any] = {
    "frequency_penalty": 0.8,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {3: 1.0},
    "min_tokens": 3,
    "stop_token_ids": [2],
}


@pytest.mark.parametrize(
    ("params", "config"),
    [
        ({"temperature": 1.0}, {}),
        ({"temperature": 0.7, "top_p": 0.8}, {"num_blocks": 40}),
        ({"temperature": 1.0, **PENALTIES}, {"max_tokens": 3}),
    ],
    ids=["plain", "filtered and parked", "penalties"],
)
def test_answers_are_distributed_as_the_targets_alone(
    params: dict[str, Any], config: dict[str, Any]
) -> None:
    world = World(**config)
    counts = world.counts(NUM_SAMPLES, **params)
    assert worst(counts, **params) < CRITICAL
    assert (world.engine.stats.num_preemptions > 0) == ("num_blocks" in config)
    assert 0.2 < world.num_held / world.num_drafts < 0.9


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}])
def test_acceptance_is_one_less_the_distance(params: dict[str, Any]) -> None:
    """With three tokens each answer has one draft, behind its first."""
    world, num = World(), 2048
    world.counts(num, max_tokens=3, **params)
    first = joint(TARGET, PROMPT, 1, with_params(**params))
    held = [
        np.minimum(*(row(t, PROMPT, [token], with_params(**params)) for t in (TARGET, DRAFT))).sum()
        for token in range(NUM_TOKENS)
    ]
    expected = float(first @ held)
    deviation = math.sqrt(expected * (1 - expected) / num)
    assert world.num_drafts == num
    assert abs(world.num_held / num - expected) < CRITICAL * deviation


def choice_by_tokens(_: Speculator, offers: Any, room: int) -> list[int]:
    """Leaves out what was drawn, where it turned out to be unlikely."""
    del room
    drafts = [offer.drafts[0] for offer in offers]
    return [len(d.tokens) * (d.probs[0].of(d.tokens[0]) > 0.2) for d in drafts]


def test_answers_are_right_however_far_the_draft_model_is() -> None:
    assert worst(World(draft=FAR).counts(2048)) < CRITICAL


@pytest.mark.parametrize(
    ("where", "name", "mistake"),
    [
        (rejection, "_left", lambda target, source: target.probs),
        (rejection, "_ACCEPT", rejection._DRAFT),
        (Speculator, "_choose", choice_by_tokens),
    ],
    ids=["no residual", "shared noise", "choice by tokens"],
)
def test_mistakes_would_be_found(
    where: object, name: str, mistake: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(draft=FAR)
    monkeypatch.setattr(where, name, mistake)
    assert worst(world.counts(2048)) > 1.5 * CRITICAL


def plain(*requests: Request) -> list[list[int]]:
    world = World(draft=None)
    answers = sorted(world.run(*requests))
    assert not world.num_drafts
    return answers


def test_what_is_greedy_or_text_stays_coupled() -> None:
    """And so gives the tokens that it gives without drafts."""
    greedy = list(asked(16, max_tokens=60, temperature=0.0))
    world = World(draft=TARGET)
    assert sorted(world.run(*greedy)) == plain(*greedy)
    sampled = list(asked(64, max_tokens=60, temperature=0.1))
    texts = World(draft=None, texts=True)
    assert sorted(texts.run(*sampled)) == plain(*sampled)
    assert world.num_held == world.num_drafts > 100
    assert texts.num_held > 0


def test_what_looks_at_drafts_themselves_is_not_drawn() -> None:
    grammar = CompiledGrammar(key="", backend="", payload=b"", num_bytes=0)
    (request,) = asked(16)
    assert is_drawn(request)
    assert not is_drawn(replace(request, grammar=grammar))
    assert not is_drawn(replace(request, params=with_params(temperature=0.0)))


def test_a_seed_gives_the_same_answers_where_drafts_begin_alike() -> None:
    requests = list(asked(64, max_tokens=30))
    assert list(World().run(*requests)) == list(World().run(*requests))
    assert list(World(max_tokens=3).run(*requests)) != list(World().run(*requests))


def test_logprobs_are_those_of_the_targets_own_rows() -> None:
    world, found = World(), 0
    (request,) = asked(16, max_tokens=40, logprobs=1, temperature=0.7, top_p=0.9)
    tokens: dict[int, list[int]] = defaultdict(lambda: list(PROMPT))
    world.engine.add(request)
    while world.engine.has_unfinished:
        for event in world.engine.step():
            for token, given in zip(event.token_ids, event.logprobs, strict=True):
                seen = tokens[event.index]
                scores = TARGET[(len(seen) - 1) % len(TARGET), seen[-1]]
                expected = scores - np.log(np.exp(scores).sum())
                assert given.token_id == token
                assert given.logprob == pytest.approx(expected[token], abs=1e-5)
                seen.append(token)
                found += 1
    assert found == 16 * 40


@pytest.mark.parametrize(("draft", "least", "most"), [(TARGET, 0.6, 0.95), (-3 * TARGET, 0, 0.05)])
def test_rows_are_spent_as_they_pay(draft: np.ndarray, least: float, most: float) -> None:
    """Though it is settled before a draft is drawn, useless ones are soon left alone."""
    world = World(draft=draft, economy=Economy(FixedCost(DEAR_ROWS)), max_tokens=4)
    (request,) = (replace(r, params=replace(r.params, n=1)) for r in asked(16, max_tokens=100))
    assert len(list(world.run(request))) == 1
    assert least <= world.num_drafts / 100 <= most


# --- as it is started ---


def test_a_draft_model_that_equals_the_target_is_always_right_and_grammars_stay_coupled(
    checkpoint: Checkpoint,
) -> None:
    path = str(checkpoint("llama"))
    free = [SamplingParams(temperature=0.9, seed=i, max_tokens=60, top_p=0.9) for i in range(3)]
    held = SamplingParams(temperature=1.2, seed=9, max_tokens=60)
    shared: dict[str, Any] = {"kv_cache_bytes": 32 << 20, "num_threads": 1}
    regex = [*[None] * 3, StructuredOutputs(regex="[ab]{20,30}!")]

    def texts(llm: LLM) -> list[str]:
        outputs = llm.generate(["Go: "] * 4, [*free, held], structured_outputs=regex)
        return [output.outputs[0].text for output in outputs]

    with (
        LLM(path, speculation="off", **shared) as off,
        LLM(path, draft_model=path, draft_sampling="rejection", **shared) as drawing,
    ):
        drafter = draft_whatever_it_costs(drawing._engine)
        set_economy(drafter, EagerEconomy(FixedCost(FREE_ROWS)))
        drafter._candidates._texts = ()
        plain_texts, drawn_texts = texts(off), texts(drawing)
        assert drawn_texts[3] == plain_texts[3]
        assert drawn_texts[:3] != plain_texts[:3]
        stats = drawing._engine.stats
        assert verified(stats, "model") - accepted(stats, "model") <= 4  # behind the ends
        assert accepted(stats, "model") > 100


def test_it_is_refused_without_a_draft_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("llama")
    shape = HeadShape(taps=(1, 2, 3))
    head = write_head(tmp_path / "head", shape, head_tensors(shape))
    for draft, sampling, message in [
        (None, "rejection", "there is none: name one with --draft"),
        (head, "rejection", "--draft names an EAGLE head"),
        (path, "rejecting", "takes coupled or rejection"),
    ]:
        with pytest.raises(ConfigError, match=message) as refusal:
            start_engine(options(path, draft, draft_sampling=sampling))
        assert refusal.value.param == "draft_sampling"
