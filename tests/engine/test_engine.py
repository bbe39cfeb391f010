"""The engine over an executor whose logits are a hash of what a row sees."""

from __future__ import annotations

import gc
import random
import weakref
from collections import defaultdict

import pytest
from support.history_executor import EOS, HistoryExecutor, engine_config, expected_greedy

from plait.platform.core import Event, FinishReason, Request, SamplingParams
from plait.platform.engine import Engine
from plait.platform.errors import Overloaded

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def make_engine(**config: object) -> tuple[Engine, HistoryExecutor]:
    resolved = engine_config(**config)  # type: ignore[arg-type]
    executor = HistoryExecutor(resolved)
    return Engine(resolved, executor, None), executor


def request(
    name: str, prompt: list[int], params: SamplingParams = GREEDY, **rest: object
) -> Request:
    return Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, **rest)  # type: ignore[arg-type]


def run(engine: Engine) -> dict[tuple[str, int], list[Event]]:
    """Step to the end; events by (request, index)."""
    events: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for _ in range(100_000):
        if not engine.has_unfinished:
            return events
        for event in engine.step():
            events[event.request_id, event.index].append(event)
    raise AssertionError("the engine does not come to an end")


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Random prompts, half of which begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 61) for _ in range(longest)]
    drawn = []
    for _ in range(count):
        shared = common[: rng.randrange(longest)] if rng.random() < 0.5 else []
        drawn.append(shared + [rng.randrange(3, 61) for _ in range(rng.randrange(1, 12))])
    return drawn


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_each_answer_is_that_of_its_own_history(
    num_blocks: int, rows: int, window: int | None, prefix_caching: bool
) -> None:
    engine, _ = make_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=rows,
        max_num_seqs=min(8, rows),
        window=window,
        prefix_caching=prefix_caching,
    )
    asked = prompts(24)
    for i, prompt in enumerate(asked):
        engine.add(request(str(i), prompt))
    events = run(engine)
    for i, prompt in enumerate(asked):
        assert tokens(events[str(i), 0]) == expected_greedy(prompt, 12, window), f"request {i}"
    assert engine.stats.kv_usage == 0
    if num_blocks == 24 and rows >= 5:
        assert engine.stats.num_preemptions > 0


def test_n_answers_share_the_prompt_and_differ_by_seed_only() -> None:
    params = SamplingParams(temperature=1.0, seed=7, n=4, max_tokens=8, ignore_eos=True)
    prompt = prompts(1, seed=3)[0] * 2
    engine, executor = make_engine(prefix_caching=False)
    engine.add(request("n", prompt, params))
    together = run(engine)
    assert executor.num_rows <= len(prompt) + 4 * (8 + engine.config.cache.block_size)
    alone, _ = make_engine()
    alone.add(request("one", prompt, SamplingParams(**{**_fields(params), "n": 1})))
    assert tokens(together["n", 0]) == tokens(run(alone)["one", 0])
    assert len({tuple(tokens(together["n", i])) for i in range(4)}) > 1


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__slots__}


def test_seeded_samples_do_not_depend_on_the_mix() -> None:
    asked = prompts(16, seed=1)
    params = [
        SamplingParams(temperature=0.3 + 0.1 * i, seed=i, top_p=0.9, top_k=i, max_tokens=10)
        for i in range(16)
    ]
    engine, _ = make_engine(num_blocks=30)
    for i, prompt in enumerate(asked):
        engine.add(request(str(i), prompt, params[i]))
    together = run(engine)
    for i, prompt in enumerate(asked):
        alone, _ = make_engine()
        alone.add(request("x", prompt, params[i]))
        assert tokens(run(alone)["x", 0]) == tokens(together[str(i), 0])


def test_a_request_that_breaks_the_forward_ends_alone() -> None:
    engine, executor = make_engine()
    executor.poison = {60}
    good, bad = [[5, 6, 7], [8, 9]], [10, 60, 11]
    for i, prompt in enumerate([good[0], bad, good[1]]):
        engine.add(request(str(i), prompt))
    engine_events = run(engine)
    last = engine_events["1", 0][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error[0] == "internal_error"
    for name, prompt in (("0", good[0]), ("2", good[1])):
        expected = expected_greedy(prompt, 12)
        if 60 not in expected[:-1]:
            assert tokens(engine_events[name, 0]) == expected
    assert engine.stats.kv_usage == 0


def test_nan_logits_end_their_request_alone() -> None:
    engine, executor = make_engine()
    executor.nan_on = {59}
    engine.add(request("nan", [3, 59]))
    engine.add(request("good", [3, 4]))
    events = run(engine)
    assert events["nan", 0][-1].finish_reason is FinishReason.ERROR
    assert tokens(events["good", 0]) == expected_greedy([3, 4], 12)


def test_text_that_cannot_be_made_ends_its_request_alone() -> None:
    engine, _ = make_engine()
    engine.add(request("bad", [3, 59]))
    engine.add(request("good", [3, 4]))
    for sequence in engine.scheduler._sequences.requests.sequences("bad"):
        sequence.text = BrokenText()
    events = run(engine)
    assert events["bad", 0][-1].error is not None
    assert [e.finish_reason for e in events["bad", 0]] == [FinishReason.ERROR]
    assert tokens(events["good", 0]) == expected_greedy([3, 4], 12)
    assert engine.stats.kv_usage == 0


class BrokenText:
    def append(self, token_id: int) -> str | None:
        raise ValueError(token_id)

    def take(self, *, final: bool = False) -> str:
        return "the end" if final else ""


def test_tokens_are_counted_by_what_they_are() -> None:
    engine, _ = make_engine()
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine.add(request("a", list(range(3, 40)), params))
    run(engine)
    assert (engine.stats.prompt_tokens, engine.stats.generation_tokens) == (37, 5)


def test_events_tell_how_long_a_request_was_queued() -> None:
    now = 100.0
    resolved = engine_config(max_num_seqs=1)
    engine = Engine(resolved, HistoryExecutor(resolved), None, clock=lambda: now)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add(request("first", [3], params))
    engine.add(request("second", [4], params))
    queued = {}
    while engine.has_unfinished:
        now += 1.0
        queued.update({event.request_id: event.queued_s for event in engine.step()})
    assert queued == {"first": 1.0, "second": 2.0}


def test_abort_gives_one_last_event_and_every_block_back() -> None:
    engine, _ = make_engine()
    engine.add(request("a", list(range(3, 40)), SamplingParams(temperature=0.0, n=3)))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never seen")
    events = run(engine)
    assert [events["a", i][-1].finish_reason for i in range(3)] == [FinishReason.ABORT] * 3
    assert engine.stats.kv_usage == 0


def test_a_deadline_ends_the_request_with_its_code() -> None:
    now = 100.0
    resolved = engine_config()
    engine = Engine(resolved, HistoryExecutor(resolved), None, clock=lambda: now)
    engine.add(request("late", [3, 4, 5], deadline_s=101.0))
    engine.step()
    now = 102.0
    last = run(engine)["late", 0][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert last.error[0] == "deadline_exceeded"


def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    engine, _ = make_engine(max_num_seqs=1, max_num_queued=1)
    engine.add(request("a", [3]))
    engine.add(request("b", [4]))
    with pytest.raises(Overloaded):
        engine.add(request("c", [5]))
    assert set(run(engine)) == {("a", 0), ("b", 0)}


def test_prompt_logprobs_come_once_and_cover_the_prompt() -> None:
    prompt = prompts(1, seed=5, longest=30)[0] * 3
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=3, ignore_eos=True)
    engine, _ = make_engine(max_num_batched_tokens=8)
    for name in ("first", "again"):  # the second would hit the prefix cache
        engine.add(request(name, prompt, params))
        events = run(engine)[name, 0]
        (given,) = [e.prompt_logprobs for e in events if e.prompt_logprobs is not None]
        assert [entry.token_id for entry in given] == prompt[1:]
        assert all(len(entry.top) == 2 for entry in given)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_prompt_logprobs_of_a_single_token_are_none_but_come(max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=max_tokens, n=2)
    engine, _ = make_engine()
    engine.add(request("one", [7], params))
    events = run(engine)
    given = [e.prompt_logprobs for index in (0, 1) for e in events["one", index]]
    assert [entries for entries in given if entries is not None] == [()]


def test_no_token_is_asked_for_with_max_tokens_zero() -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=0)
    engine, _ = make_engine()
    engine.add(request("echo", [3, 4, 5], params))
    (event,) = run(engine)["echo", 0]
    assert event.finish_reason is FinishReason.LENGTH
    assert event.token_ids == ()
    assert event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == 2


def test_a_thousand_random_requests_with_random_aborts_leave_every_block_free() -> None:
    rng = random.Random(11)
    engine, _ = make_engine(num_blocks=40, window=6, max_num_queued=64)
    asked = prompts(1000, seed=12)
    ended: dict[tuple[str, int], int] = defaultdict(int)
    live: set[str] = set()
    pending = list(range(1000))
    while pending or engine.has_unfinished:
        while pending and rng.random() < 0.7:
            i = pending.pop()
            params = SamplingParams(
                n=rng.choice([1, 1, 1, 3]),
                temperature=rng.choice([0.0, 0.8]),
                seed=i,
                max_tokens=rng.randrange(0, 12),
                presence_penalty=rng.choice([0.0, 0.5]),
            )
            try:
                engine.add(request(str(i), asked[i], params, priority=rng.randrange(3)))
            except Overloaded:
                pending.insert(0, i)
                break
            live.add(str(i))
        if live and rng.random() < 0.2:
            engine.abort(rng.choice(sorted(live)))
        for event in engine.step():
            if event.finish_reason is not None:
                ended[event.request_id, event.index] += 1
        engine.scheduler.check_integrity()
    assert set(ended.values()) == {1}
    assert {name for name, _ in ended} == {str(i) for i in range(1000)}
    assert engine.stats.kv_usage == 0
    assert engine.stats.num_running == engine.stats.num_waiting == 0


def test_eos_ends_an_answer() -> None:
    engine, _ = make_engine()
    ends = [p for p in prompts(400, seed=9) if EOS in expected_greedy(p, 12)]
    engine.add(request("e", ends[0]))
    events = run(engine)["e", 0]
    assert tokens(events)[-1] == EOS
    assert events[-1].finish_reason is FinishReason.STOP


def test_nothing_of_an_ended_sequence_is_kept() -> None:
    """Penalties, drafts, logprobs and text are counted by sequence, and go with it."""
    engine, _ = make_engine()
    kept = weakref.WeakSet()
    for i in range(4):
        params = SamplingParams(
            max_tokens=6, repetition_penalty=1.2, frequency_penalty=0.5, n=2, logprobs=1, seed=i
        )
        engine.add(Request(request_id=f"{i}", prompt_token_ids=(5, 6, 7), params=params))
        kept.update(engine.scheduler._sequences.requests.unfinished())
    assert len(kept) == 8
    while engine.has_unfinished:
        engine.step()
    gc.collect()
    assert not kept
