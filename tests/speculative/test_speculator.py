"""Drafts in the engine's steps: whatever they are, the answers are those without them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from support.constrained import (
    Answer,
    ScriptedExecutor,
    answers,
    check_finished,
    drain,
    drawn,
    hashed,
    make_engine,
    request,
)
from support.drafting import DEAR_ROWS, EagerEconomy, FixedCost
from support.grammars import END, OTHER_END, SIZE, SPECIAL, WIDTH, vocabulary
from support.history_executor import engine_config
from support.synthetic_drafters import SyntheticDrafter, adversary, oracle, sometimes

from plait.platform.core import AdapterUse, Event, Request, Sequence, SequenceState, Speculation
from plait.platform.engine import Engine
from plait.speculative.economy import Economy
from plait.speculative.lookup import SequenceLookup
from plait.speculative.recent import RecentAnswers
from plait.speculative.source import Draft, Sources
from plait.speculative.speculator import Speculator
from plait.structured.strand import GrammarStrand

Known = dict[tuple[str, int], Answer]


def drafting(
    model: SyntheticDrafter | None = None,
    *,
    economy: Economy | None = None,
    max_tokens: int = 4,
    texts: bool = False,
    **config: Any,
) -> tuple[Engine, GrammarStrand, Speculator]:
    made = engine_config(**config)
    info = replace(made.model, vocab_size=WIDTH, eos_token_ids=(END, OTHER_END))
    made = replace(made, model=info)
    strand = GrammarStrand(vocabulary)
    drafter = Speculator(
        economy or EagerEconomy(),
        Sources(
            constraints=strand,
            texts=(SequenceLookup(WIDTH), RecentAnswers(WIDTH)) if texts else (),
            model=model,
        ),
        max_tokens=max_tokens,
        vocab_size=WIDTH,
    )
    executor = ScriptedExecutor(made, hashed)
    engine = Engine(made, executor, None, strands=[strand, drafter], drafter=drafter)
    return engine, strand, drafter


def run(engine: Engine, strand: GrammarStrand, asked: list[Request]) -> list[Event]:
    for one in asked:
        engine.add(one)
    return drain(engine, strand)


def plain(asked: list[Request]) -> Known:
    """Each by itself, without drafts, in a world with room."""
    found: Known = {}
    for one in asked:
        engine, strand = make_engine(force=False, prefix_caching=False, num_blocks=256)
        found |= answers(run(engine, strand, [one]))
    return found


def outputs(known: Known) -> dict[tuple[str, int], tuple[int, ...]]:
    return {key: tokens for key, (tokens, _, _) in known.items()}


DRAFTERS = {
    "oracle": oracle,
    "adversary": lambda known: adversary(known, [END, SPECIAL, 5, OTHER_END, WIDTH + 7, -1, 300]),
    "half": lambda known: sometimes(known, 0.5, SIZE),
    "mostly": lambda known: sometimes(known, 0.9, SIZE),
}


@pytest.mark.parametrize(("max_tokens", "texts"), [(1, True), (3, False), (7, True)])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_any_mix_equals_plain(drafter: str, max_tokens: int, texts: bool) -> None:
    """Chunks, prefix hits, parking, aborts, grammars, `n`, every option, drafts of all sources."""
    seed = hash((len(drafter), max_tokens, texts)) % 1000
    rng = random.Random(seed)
    asked = drawn(seed, 16)
    known = plain(asked)
    model = DRAFTERS[drafter](outputs(known))
    engine, _, speculator = drafting(
        model,
        max_tokens=max_tokens,
        texts=texts,
        num_blocks=rng.choice([24, 40]),
        max_num_seqs=8,
        max_num_batched_tokens=rng.choice([12, 16, 64]),
        prefix_caching=rng.random() < 0.5,
        window=rng.choice([None, 9]),
    )
    pending, strangers, events = list(asked), 0, []
    while pending or engine.has_unfinished:
        if pending and rng.random() < 0.5:
            engine.add(pending.pop())
        if pending and rng.random() < 0.2:
            strangers += 1
            stranger = replace(pending[0], request_id=f"stranger-{strangers}", priority=-1)
            engine.add(stranger)
        if strangers and rng.random() < 0.4:
            engine.abort(f"stranger-{rng.randrange(strangers) + 1}")
        events += engine.step()
        engine.scheduler.check_integrity()
    events = [event for event in events if not event.request_id.startswith("stranger")]
    assert answers(events) == known
    check_finished(events)
    assert engine.stats.drafts["model"][0] > 0
    assert not speculator._states, "kept of sequences that have ended"
    assert not model.following
    assert_counts(engine, events)


def assert_counts(engine: Engine, events: list[Event]) -> None:
    """Counters are those of the events, and no source's exceed what there was."""
    for event in events:
        if event.finish_reason is not None:
            assert sum(v for _, v, _ in event.draft_counts) == event.num_draft_tokens
            assert sum(a for _, _, a in event.draft_counts) == event.num_accepted_tokens
            assert event.num_accepted_tokens <= min(event.num_draft_tokens, event.num_output_tokens)
    stats = engine.stats
    assert stats.accepted_by_position == tuple(sorted(stats.accepted_by_position, reverse=True))
    if stats.accepted_by_position:
        assert stats.accepted_by_position[0] <= stats.num_draft_runs


def free(number: int, **params: Any) -> Request:
    prompt = (*b"Give:", number)
    return request(f"free-{number}", prompt=prompt, **({"max_tokens": 60} | params))


@pytest.mark.parametrize("batch", [1, 8])
def test_a_perfect_drafter_of_four_gives_nearly_five_tokens_a_step(batch: int) -> None:
    asked = [free(i, ignore_eos=True, max_tokens=100) for i in range(batch)]
    model = oracle(outputs(plain(asked)))
    engine, strand, _ = drafting(
        model,
        economy=Economy(FixedCost({1: 1.0, 4096: 1.0})),
        max_num_batched_tokens=64,
        num_blocks=400,
    )
    events = run(engine, strand, asked)
    steps = engine.stats.num_steps
    assert sum(len(event.token_ids) for event in events) == 100 * batch
    assert 100 / (steps - 1) >= 4.5


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_useless_drafter_costs_next_to_nothing(batch: int, seconds: float) -> None:
    """In the time of a machine whose first row takes as long as six more."""
    asked = [free(i, ignore_eos=True, max_tokens=100) for i in range(batch)]
    model = adversary(outputs(plain(asked[:1])), [SPECIAL, 5], seconds=seconds)
    economy = Economy(FixedCost(DEAR_ROWS))
    engine, strand, speculator = drafting(
        model, economy=economy, max_num_batched_tokens=256, max_num_seqs=32, num_blocks=2000
    )
    rows: list[int] = []
    computed = speculator.computed

    def counted(plan: Any, result: Any, _seconds: float) -> None:
        rows.append(plan.num_rows)
        computed(plan, result, economy.cost.seconds(plan.num_rows))

    speculator.computed = counted  # type: ignore[method-assign]
    run(engine, strand, asked)
    drafted = sum(counts[0] for counts in engine.stats.drafts.values())
    spent = sum(economy.cost.seconds(n) for n in rows) + model_seconds(economy)
    without = spent - model_seconds(economy) - drafted / 6
    assert model.num_asked > 0
    assert spent / without < 1.03


def model_seconds(economy: Economy) -> float:
    cost, _ = economy.ledger.report().get("model", (0.0, 0.0))
    return cost


def test_a_request_says_how_far_to_draft_or_not_at_all() -> None:
    asked = [
        replace(free(0), speculation=Speculation(enabled=False)),
        replace(free(1), speculation=Speculation(max_tokens=2)),
        replace(free(2), speculation=Speculation(max_tokens=0)),
        free(3),
    ]
    known = plain(asked)
    engine, _, _ = drafting(oracle(outputs(known)), max_tokens=4, max_num_batched_tokens=64)
    lengths: dict[str, int] = {}
    events = []
    for one in asked:
        engine.add(one)
    while engine.has_unfinished:
        new = engine.step()
        events += new
        for event in new:
            most = max(lengths.get(event.request_id, 0), len(event.token_ids))
            lengths[event.request_id] = most
    assert answers(events) == known
    assert lengths == {"free-0": 1, "free-1": 3, "free-2": 1, "free-3": 5}


def test_what_fails_while_drafting_costs_drafts_and_never_a_request() -> None:
    class Broken(SyntheticDrafter):
        def propose(self, wants: Any) -> Any:
            raise RuntimeError("no drafts today")

    asked = [free(i) for i in range(4)]
    known = plain(asked)
    engine, strand, speculator = drafting(Broken({}, lambda *_: None))
    assert answers(run(engine, strand, asked)) == known
    assert speculator._faults_in_a_row == 3
    assert engine.stats.drafts == {}


def test_what_an_adapters_answers_taught_goes_with_it() -> None:
    recent, economy = RecentAnswers(WIDTH), EagerEconomy()
    drafter = Speculator(economy, Sources(texts=(recent,)), max_tokens=4, vocab_size=WIDTH)
    uses = (AdapterUse(generation="a"), AdapterUse(generation="b"))
    for number, adapters in enumerate([(), uses[:1], uses]):
        one = replace(free(number), adapters=adapters)
        sequence = Sequence(
            seq_id=number,
            request=one,
            index=0,
            arrival=0,
            tokens=[*one.prompt_token_ids, *range(40, 60)],
            max_total_tokens=100,
            seed=0,
            state=SequenceState.FINISHED,
        )
        whose = drafter._state(sequence).whose
        economy.acceptance.observe(whose, Draft(tokens=(1,), source="suffix"), 1, 1)
        drafter.release(sequence)
    assert recent.num_kinds == 3
    drafter.forget("b")
    assert recent.num_kinds == 2
    drafter.forget("a")
    assert recent.num_kinds == 1
    assert len(economy.acceptance) == 1


def test_drafts_never_displace_prompts() -> None:
    """While a long prompt is computed in chunks, drafts take no row of it."""
    first = free(0, ignore_eos=True, max_tokens=60)
    long = request("free-9", prompt=tuple(b"x" * 90), max_tokens=2)
    known = plain([first, long])
    engine, strand, _ = drafting(
        oracle(outputs(known)), max_num_batched_tokens=16, num_blocks=200, max_model_len=160
    )
    engine.add(first)
    events = engine.step()
    engine.add(long)
    num_steps = 0
    while not any(event.request_id == "free-9" for event in events):
        events += engine.step()
        num_steps += 1
    assert num_steps <= 1 + -(-90 // 15)
    assert answers([*events, *drain(engine, strand)]) == known


def test_calibration_tells_what_a_model_s_drafts_take():
    """Before the first request: at the guess that it would else be, nobody would ask it."""
    asked = [request("a", max_tokens=12)]
    known = plain(asked)
    model = oracle(outputs(known), seconds=0.003)
    engine, strand, speculator = drafting(model)
    speculator.calibrate((0, 2))
    assert outputs(answers(run(engine, strand, asked))) == outputs(known)
    assert model.num_asked >= 2
    assert speculator._model._cost.seconds(1) == pytest.approx(0.003)
