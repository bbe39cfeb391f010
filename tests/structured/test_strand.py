"""Grammars in the engine's steps: waiting, parking, drafts, ends, faults; nothing leaks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.constrained import (
    CHOICES,
    answers,
    assert_idle,
    check_finished,
    compiled,
    drain,
    drawn,
    grammars,
    hashed,
    hostile,
    make_engine,
    request,
    text_of,
)
from support.drafting import DEAR_ROWS, accepted, verified
from support.fake_adapters import AdapterFiles
from support.grammars import END, FIRST_LONGER, OTHER_END, vocabulary

from plait.adapters.pool import AdapterPool
from plait.adapters.strand import AdapterStrand
from plait.platform.core import AdapterUse, CompiledGrammar, Event, FinishReason, Request
from plait.platform.engine import Engine
from plait.platform.errors import GrammarFault, GrammarTooComplex
from plait.structured.matcher import Matcher, MatcherStore
from plait.structured.spec import GrammarKind
from plait.structured.strand import GrammarStrand
from plait.structured.vocabulary import Vocabulary

BACKEND_OF = {"schema": "xgrammar", "bounded": "llguidance"}


def run(asked: list[Request], logits: Any = hashed, **options: Any) -> list[Event]:
    engine, strand = make_engine(logits, **options)
    for one in asked:
        engine.add(one)
    return drain(engine, strand)


# --- alone and together ------------------------------------------------------------------------


def alone(asked: list[Request]) -> dict[tuple[str, int], Any]:
    """The reference: each by itself, without forced drafts, in a world with room."""
    found: dict[tuple[str, int], Any] = {}
    for one in asked:
        found |= answers(run([one], force=False, prefix_caching=False, num_blocks=256))
    return found


def test_both_backends_are_in_the_mix() -> None:
    assert {name: grammars()[name].backend for name in BACKEND_OF} == BACKEND_OF


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("force", [True, False])
def test_any_mix_equals_alone(seed: int, force: bool) -> None:
    """Random moments of arrival, aborts of strangers, parking for lack of blocks."""
    rng = random.Random(seed)
    asked = drawn(seed, 24)
    engine, strand = make_engine(
        force=force,
        num_blocks=24,
        max_num_seqs=8,
        max_num_batched_tokens=(8, 16, 64, 64)[seed],
        prefix_caching=rng.random() < 0.5,
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
    assert_idle(engine, strand)
    events = [event for event in events if not event.request_id.startswith("stranger")]
    assert answers(events) == alone(asked)
    assert check_finished(events) > 5
    assert engine.stats.num_preemptions > 0
    assert (accepted(engine.stats, "grammar") > 0) == force


def test_counts_of_drafts_are_those_of_the_events() -> None:
    engine, strand = make_engine()
    for one in drawn(7, 12):
        engine.add(one)
    final = [event for event in drain(engine, strand) if event.finish_reason]
    stats = engine.stats
    assert verified(stats, "grammar") == sum(event.num_draft_tokens for event in final) > 0
    assert accepted(stats, "grammar") == sum(event.num_accepted_tokens for event in final) > 0
    assert stats.grammar_sequences == sum("free" not in event.request_id for event in final)


# --- adversaries -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("force", [True, False])
def test_a_model_that_prefers_what_is_illegal_ends_with_valid_answers(
    temperature: float, force: bool
) -> None:
    bounded = [name for name in grammars() if name != "endless"]
    asked = [
        request(f"{name}-{seed}", grammars()[name], temperature=temperature, seed=seed, n=2)
        for name in bounded
        for seed in range(3)
    ]
    asked = [replace(one, params=replace(one.params, max_tokens=80)) for one in asked]
    events = run(asked, hostile, force=force, num_blocks=400)
    assert check_finished(events) == 2 * len(asked)


def test_an_answer_that_is_cut_says_so() -> None:
    (answer,) = answers(run([request("endless-0", grammars()["endless"], max_tokens=20)])).values()
    assert answer[1] == f"{FinishReason.LENGTH}:None"
    assert len(answer[0]) == 20


# --- ends --------------------------------------------------------------------------------------


def test_an_answer_ends_with_its_last_token_and_no_other_step() -> None:
    grammar = compiled(GrammarKind.CHOICE, ["xyz"])
    engine, strand = make_engine(force=False)
    engine.add(request("a", grammar))
    events = drain(engine, strand)
    assert answers(events)["a", 0][:2] == (tuple(b"xyz"), f"{FinishReason.STOP}:None")
    assert engine.stats.num_steps <= 4  # the prompt gives the first token


def test_a_complete_answer_at_max_tokens_has_stopped() -> None:
    grammar = compiled(GrammarKind.CHOICE, ["xyz"])
    for max_tokens, reason in ((3, FinishReason.STOP), (2, FinishReason.LENGTH)):
        (answer,) = answers(run([request("a", grammar, max_tokens=max_tokens)])).values()
        assert answer[1] == f"{reason}:None"


def test_where_text_may_end_or_go_on_the_model_decides_by_its_end_token() -> None:
    grammar = compiled(GrammarKind.REGEX, "x{1,9}")

    def ends_after_three(history: list[int]) -> np.ndarray:
        row = hashed(history)
        row[OTHER_END] += 90 * (history[-3:] == [ord("x")] * 3)
        row[[END, OTHER_END]] -= 50
        return row

    (answer,) = answers(run([request("a", grammar)], ends_after_three)).values()
    assert answer[:2] == ((*b"xxx", OTHER_END), f"{FinishReason.STOP}:None")
    # Too early for an end: it goes on, and where nothing can follow it ends all the same.
    for min_tokens, expected in ((4, (*b"xxxx", OTHER_END)), (30, tuple(b"x" * 9))):
        asked = [request("a", grammar, min_tokens=min_tokens)]
        (answer,) = answers(run(asked, ends_after_three)).values()
        assert answer[:2] == (expected, f"{FinishReason.STOP}:None")


def test_min_tokens_bans_stop_tokens_only_where_something_else_may_follow() -> None:
    grammar = compiled(GrammarKind.CHOICE, ["abab"])
    asked = [request("a", grammar, min_tokens=3, stop_token_ids=(ord("b"), FIRST_LONGER + 3))]
    (answer,) = answers(run(asked, force=False)).values()
    assert text_of(answer[0]) == "abab"


# --- opening -----------------------------------------------------------------------------------


class SlowStore(MatcherStore):
    """Opens when told to, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.go = threading.Event()
        self.error = error

    def open(self, compiled: CompiledGrammar, vocabulary: Vocabulary) -> Matcher:
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        return super().open(compiled, vocabulary)


def test_a_sequence_waits_for_its_grammar_while_others_run() -> None:
    store = SlowStore()
    engine, strand = make_engine(store=store)
    engine.add(replace(request("waits", grammars()["choice"], n=2), tenant="other"))
    engine.add(request("free", max_tokens=5))
    events: list[Event] = []
    while not any(event.finish_reason for event in events):
        events += engine.step()
        engine.scheduler.check_integrity()
    assert {event.request_id for event in events} == {"free"}
    assert engine.step() == []  # it waits a moment, and nothing is lost
    store.go.set()
    found = answers(drain(engine, strand))
    assert all(text_of(found["waits", index][0]) in CHOICES for index in range(2))


def test_an_abort_while_a_grammar_is_opened_leaves_nothing() -> None:
    store = SlowStore()
    engine, strand = make_engine(store=store)
    engine.add(request("a", grammars()["choice"], n=3))
    engine.step()
    engine.abort("a")
    assert {e.finish_reason for e in drain(engine, strand)} == {FinishReason.ABORT}
    store.go.set()


@pytest.mark.parametrize(
    ("error", "code", "is_ours"),
    [
        (GrammarFault("no"), "grammar_internal_error", True),
        (RuntimeError("no"), "grammar_internal_error", True),
        (GrammarTooComplex("no"), "grammar_too_complex", False),
    ],
    ids=repr,
)
def test_a_grammar_that_cannot_be_opened_ends_its_request_alone(
    error: Exception, code: str, is_ours: bool
) -> None:
    store = SlowStore(error)
    store.go.set()
    engine, strand = make_engine(store=store)
    engine.add(request("bad", grammars()["choice"], n=2))
    engine.add(request("free"))
    ends = {(e.request_id, e.index): e for e in drain(engine, strand) if e.finish_reason}
    for index in range(2):
        assert ends["bad", index].error[0] == code
    assert ends["free", 0].error is None
    assert (engine.stats.grammar_faults > 0) is is_ours


def test_a_grammar_for_another_vocabulary_is_refused() -> None:
    other = replace(grammars()["choice"], vocabulary="0" * 64)
    (event,) = [e for e in run([request("a", other)]) if e.finish_reason]
    assert event.error == (
        "grammar_internal_error",
        "the grammar was compiled for another vocabulary than the model's",
    )


def test_a_grammar_of_added_tokens_brings_them() -> None:
    from plait.structured.compiler import Compiler
    from plait.structured.spec import GrammarSpec

    added = len(vocabulary().pieces) + 3
    wider = vocabulary().extended({added: b"zz"})
    grammar = Compiler(wider).compile(GrammarSpec(kind=GrammarKind.CHOICE, content=["zz"]))
    grammar = replace(grammar, added_tokens=wider.added)

    def likes_it(history: list[int]) -> np.ndarray:
        row = hashed(history)
        row[added] += 50
        return row

    found = answers(run([request("a", grammar), request("b", grammars()["choice"])], likes_it))
    assert found["a", 0][0] == (added,)
    assert text_of(found["b", 0][0]) in CHOICES


def test_an_engine_without_grammars_never_makes_their_vocabulary() -> None:
    def never() -> Vocabulary:
        raise AssertionError("made")

    engine, _ = make_engine()
    strand = GrammarStrand(never)
    engine._strands._strands = (strand,)
    engine.scheduler._strands._strands = (strand,)
    engine.add(request("free", n=2))
    drain(engine, strand)
    assert engine.stats.mask_rows == 0
    assert strand._filler._helper is None


def test_a_request_whose_grammar_nobody_enforces_is_not_answered() -> None:
    engine, strand = make_engine()
    engine._strands._strands = ()
    engine.scheduler._strands._strands = ()
    engine.add(request("a", grammars()["choice"]))
    (event,) = drain(engine, strand)
    assert event.finish_reason is FinishReason.ERROR
    assert event.token_ids == ()


# --- with adapters -----------------------------------------------------------------------------


def with_adapters(root: Path, asked: list[Request]) -> list[Event]:
    """Four adapters, of which two at a time have room; then all are there to be asked for."""
    engine, strand = make_engine()
    root.mkdir()
    files = AdapterFiles(root)
    pool = AdapterPool(engine._executor, files.load, device_bytes=40, host_bytes=200)
    strands = (strand, AdapterStrand(pool, drain_s=0.02))
    engine = Engine(engine.config, engine._executor, None, strands=strands, adapters=pool)
    for letter in "abcd":
        engine.load_adapter(files.write(letter, device_bytes=20, kv_digest=letter * (letter > "b")))
    while engine.is_loading:
        assert engine.step() == []
        assert all(answer.error is None for answer in engine.take_adapter_results())
    for one in asked:
        engine.add(one)
    return drain(engine, strand)


def test_adapters_and_grammars_meet_in_one_batch(tmp_path: Path) -> None:
    asked = []
    for i, one in enumerate(drawn(11, 16)):
        letter = "abcd "[i % 5].strip()
        kv_digest = letter * (letter > "b")
        use = (AdapterUse(generation=letter, kv_digest=kv_digest),) if letter else ()
        asked.append(replace(one, adapters=use))
    together = with_adapters(tmp_path / "together", asked)
    assert check_finished(together) > 5
    alone = {}
    for i, one in enumerate(asked):
        alone |= answers(with_adapters(tmp_path / str(i), [one]))
    assert answers(together) == alone
    assert alone != answers(run([replace(one, adapters=()) for one in asked]))


# --- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["fill", "accept", "forced_tokens", "fill_drafts", "finished"])
def test_a_matcher_that_breaks_down_ends_its_sequence_alone(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = drawn(3, 10)
    reference = answers(run(asked))
    engine, strand = make_engine()
    real = getattr(Matcher, broken)
    call: Callable[..., Any] = real.fget if isinstance(real, property) else real

    def breaks(self: Matcher, *args: Any) -> Any:
        if self is victim and self.num_tokens >= 2:
            raise RuntimeError("broken")
        return call(self, *args)

    victim: Matcher | None = None
    patched = property(breaks) if isinstance(real, property) else breaks
    monkeypatch.setattr(Matcher, broken, patched)
    engine.add(request("victim", grammars()["schema"]))
    for one in asked:
        engine.add(one)
    events: list[Event] = []
    while engine.has_unfinished:
        events += engine.step()
        engine.scheduler.check_integrity()
        held = [h for h in strand._held.values() if h.sequence.request.request_id == "victim"]
        victim = victim or (held[0].matcher if held else None)
    assert_idle(engine, strand)
    (end,) = [e for e in events if e.request_id == "victim" and e.finish_reason]
    assert end.error is not None
    assert end.error[0] == "grammar_internal_error"
    assert engine.stats.grammar_faults == 1
    others = [e for e in events if e.request_id != "victim"]
    assert answers(others) == reference


def test_a_forward_pass_that_fails_while_masks_are_made_costs_one_request() -> None:
    asked = [one for one in drawn(5, 10) if 200 not in one.prompt_token_ids]
    engine, strand = make_engine()
    engine._executor.poison = {200}
    engine.add(request("poisoned", grammars()["choice"], prompt=(5, 200)))
    for one in asked:
        engine.add(one)
    events = drain(engine, strand)
    (end,) = [e for e in events if e.request_id == "poisoned"]
    assert end.finish_reason is FinishReason.ERROR
    assert answers(e for e in events if e.request_id != "poisoned") == answers(run(asked))


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [ord("q")]},
        {"allowed_token_ids": [ord("q"), END]},
    ],
    ids=str,
)
def test_options_that_contradict_the_grammar_end_the_request_by_name(params: Any) -> None:
    events = run([request("a", grammars()["choice"], **params), request("free")])
    ends = {e.request_id: e for e in events if e.finish_reason}
    assert ends["a"].error is not None
    code, message = ends["a"].error
    assert code == "invalid_value"
    assert "allowed_token_ids" in message
    assert ends["free"].error is None


# --- drafts ------------------------------------------------------------------------------------


def spells(text: str, tokens: list[int]) -> Callable[[list[int]], np.ndarray]:
    """A model that writes `text` by given tokens."""
    assert text_of(tokens) == text

    def logits(history: list[int]) -> np.ndarray:
        row = hashed(history)
        done = len(history) - len(b"Give:")
        if done < len(tokens):
            row[tokens[done]] += 90
        return row

    return logits


def test_forced_text_costs_fewer_steps() -> None:
    text = '{"abc":7,"kind":"red","list":[]}'
    tokens = vocabulary().encode(text)
    counts = {}
    for force in (True, False):
        engine, strand = make_engine(spells(text, tokens), force=force)
        engine.add(request("a", grammars()["schema"]))
        assert text_of(answers(drain(engine, strand))["a", 0][0]) == text
        counts[force] = engine.stats.num_steps
    assert counts[True] < 0.6 * counts[False]


def test_drafts_of_a_model_that_spells_otherwise_cost_little() -> None:
    names = [f"{'ab' * 6}{i}" for i in range(12)]
    schema = {
        "type": "object",
        "properties": {name: {"const": 1} for name in names},
        "required": names,
        "additionalProperties": False,
    }
    text = "{" + ",".join(f'"{name}":1' for name in names) + "}"
    tokens = vocabulary().encode(text)
    engine, strand = make_engine(
        spells(text, tokens), num_blocks=128, max_model_len=200, profile=DEAR_ROWS
    )
    # Forced text is taken for single bytes, which this model hardly ever chooses.
    strand._make_vocabulary = lambda: replace(vocabulary(), encode=lambda text: [*text.encode()])
    engine.add(request("a", compiled(GrammarKind.JSON_SCHEMA, schema), max_tokens=len(tokens)))
    events = drain(engine, strand)
    assert answers(events)["a", 0][:2] == (tuple(tokens), f"{FinishReason.STOP}:None")
    end = events[-1]
    wrong = end.num_draft_tokens - end.num_accepted_tokens
    assert wrong / 7 < end.num_accepted_tokens + 3  # the steps that they cost, and that they saved
