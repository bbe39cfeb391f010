"""Scheduler behaviour, one rule a test, on the simulated KV cache of `support.scheduler_world`."""

import random

import pytest
from support.scheduler_world import World, make_scheduler

from plait.platform.admission import sequence_seed
from plait.platform.core import (
    AdapterUse,
    FinishReason,
    Request,
    SamplingParams,
    SequenceState,
    SpanResult,
    StepResult,
)
from plait.platform.errors import BadRequest, ContextLengthExceeded, Overloaded, Unsupported

ENDLESS = {"ignore_eos": True}


def prompt(length, start=1):
    return [1 + (start + i) % 11 for i in range(length)]


def scheduled(plan):
    """What the plan computes: request id and index → number of rows."""
    return {f"{s.sequence.request.request_id}.{s.sequence.index}": s.num_tokens for s in plan.spans}


# --- order in a step -----------------------------------------------------------------------------


def test_every_decode_row_runs_beside_a_long_prompt():
    world = World(make_scheduler((None, 100), budget=16))
    for i in range(3):
        world.add(prompt(3, i), max_tokens=20, **ENDLESS)
    world.step()
    world.add(prompt(60), request_id="long", max_tokens=2)
    for chunk in (13, 13, 13, 13, 8):
        plan = world.step()
        assert scheduled(plan) == {"r1.0": 1, "r2.0": 1, "r3.0": 1, "long.0": chunk}
        assert [s.sequence.request.request_id for s in plan.spans][-1] == "long"
    world.drain()


def test_running_chunks_come_before_admissions_of_their_priority():
    world = World(make_scheduler((None, 100), budget=16))
    world.add(prompt(20), request_id="a")
    world.step()
    world.add(prompt(20, 5), request_id="b")
    assert scheduled(world.step()) == {"a.0": 4, "b.0": 12}


def test_a_better_priority_comes_before_chunks_that_run():
    world = World(make_scheduler((None, 100), budget=16))
    world.add(prompt(40), request_id="slow", priority=1)
    world.step()
    world.add(prompt(20, 5), request_id="urgent", priority=0)
    assert scheduled(world.step()) == {"urgent.0": 16}
    assert scheduled(world.step()) == {"urgent.0": 4, "slow.0": 12}


def test_waiting_requests_are_served_by_priority_then_arrival_without_overtaking():
    world = World(make_scheduler((None, 10), budget=100, max_num_seqs=8))
    world.add(prompt(20), request_id="runs", max_tokens=4)
    world.step()
    world.add(prompt(24, 3), request_id="big", max_tokens=1)
    world.add(prompt(2), request_id="small", max_tokens=1)
    world.add(prompt(2), request_id="first", priority=-1, max_tokens=1)
    # `big` does not fit beside `runs`, and `small` does not slip past it.
    assert scheduled(world.step()) == {"runs.0": 1, "first.0": 2}
    assert scheduled(world.step()) == {"runs.0": 1}
    world.drain()


def test_each_running_sequence_gets_a_row_even_of_the_smallest_budget():
    world = World(make_scheduler((None, 100), budget=2, max_num_seqs=8))
    for i in range(5):
        world.add(prompt(1, i), max_tokens=5, **ENDLESS)
    world.step()
    assert world.scheduler.num_running == 2
    assert len(world.step().spans) == 2


def test_drafts_leave_a_row_to_every_running_sequence():
    world = World(make_scheduler((None, 100), budget=6))
    sequences = [world.add(prompt(2, i), max_tokens=20, **ENDLESS)[0] for i in range(3)]
    world.step()
    for sequence in sequences:
        sequence.drafts[:] = [1, 2, 3, 4, 5]
    assert sorted(scheduled(world.step()).values()) == [1, 1, 4]


def test_drafts_end_where_the_output_ends():
    world = World(make_scheduler((None, 100), budget=50))
    (sequence,) = world.add(prompt(2), max_tokens=4, **ENDLESS)
    world.step()
    sequence.drafts[:] = [1, 2, 3, 4, 5]
    (span,) = world.step().spans
    assert span.drafts == (1, 2)  # two drafts and the token that comes with them


# --- admission -----------------------------------------------------------------------------------


def test_a_prompt_has_all_its_blocks_before_its_first_chunk():
    world = World(make_scheduler((None, 12), budget=8))
    (first,) = world.add(prompt(40), max_tokens=2)
    (second,) = world.add(prompt(40, 4), max_tokens=2)
    world.step()
    assert len(first.block_ids[0]) == 10
    assert second.state is SequenceState.WAITING
    assert not second.block_ids[0]
    world.drain()
    assert world.scheduler.num_preemptions == 0


def test_a_sliding_group_holds_only_window_and_chunk_of_a_long_prompt():
    world = World(make_scheduler((8, 8), budget=8, max_model_len=500))
    (sequence,) = world.add(prompt(300), max_tokens=4)
    while world.step() is not None:
        held = sum(1 for ids in sequence.block_ids for block in ids if block)
        assert held <= 5  # 7 tokens of window and 8 of chunk, at any place
    assert sequence.num_preemptions == 0


def test_the_watermark_is_kept_at_admission_and_ignored_when_nothing_runs():
    world = World(make_scheduler((None, 10), budget=100, watermark=0.2))
    world.add(prompt(28), request_id="a", max_tokens=8, **ENDLESS)
    world.add(prompt(8, 4), request_id="b", max_tokens=1)
    assert scheduled(world.step()) == {"a.0": 28}  # 3 free; b needs 2 and 2 are kept
    world.drain()
    world.add(prompt(37, 6), request_id="c", max_tokens=1)
    assert scheduled(world.step()) == {"c.0": 37}


def test_overload_counts_only_requests_never_admitted():
    world = World(make_scheduler((None, 100), max_num_seqs=1, max_num_queued=2))
    world.add(prompt(3), n=4)  # its forks wait, but not for a first admission
    world.step()
    world.add(prompt(3), request_id="b")
    world.add(prompt(3), n=2)
    with pytest.raises(Overloaded, match="2 requests") as raised:
        world.add(prompt(3))
    assert (raised.value.status, raised.value.retry_after_s) == (503, 1.0)
    world.abort("b")
    world.add(prompt(3))
    world.drain()


def test_a_prompt_may_fill_the_context_where_no_output_is_wanted():
    world = World(make_scheduler((None, 100), max_model_len=20))
    world.add(prompt(20), max_tokens=0)
    world.drain()
    with pytest.raises(ContextLengthExceeded):
        world.add(prompt(21), max_tokens=0)


def test_lengths_over_the_context_are_refused_with_the_numbers():
    world = World(make_scheduler((None, 100), max_model_len=20))
    with pytest.raises(ContextLengthExceeded, match=r"20 tokens.*20") as raised:
        world.add(prompt(20), max_tokens=1)
    assert raised.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded, match=r"21 tokens.*15.*20") as raised:
        world.add(prompt(15), max_tokens=6)
    assert raised.value.param == "max_tokens"
    world.add(prompt(15), max_tokens=5)
    world.drain()


@pytest.mark.parametrize("n", [1, 3])
def test_lengths_over_the_kv_memory_are_refused_and_those_within_finish(n):
    world = World(make_scheduler((None, 6), (3, 3), budget=8))
    with pytest.raises(ContextLengthExceeded, match=r"10 prompt tokens and 16 .*25.*24"):
        world.add(prompt(10), max_tokens=16, n=n)
    world.add(prompt(10), max_tokens=15, n=n, **ENDLESS)
    world.drain()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_what_fits_alone_by_the_numbers_fits_and_no_more_is_refused(window, block_size, n):
    for blocks in range(1, 14):
        world = World(
            make_scheduler((window, blocks), block_size=block_size, budget=7, max_model_len=80)
        )
        alone = world.kv.slots_alone(forks=n > 1)
        slots = min(alone, 60)
        length = max(1, slots - 8)
        world.add(prompt(length), max_tokens=slots - length + 1, n=n, **ENDLESS)
        world.drain(random.Random(blocks))


def test_requests_that_cannot_be_served_are_refused_by_name():
    world = World(make_scheduler((None, 10)))
    world.add(prompt(3), request_id="a")
    with pytest.raises(BadRequest, match="'a' is in use"):
        world.add(prompt(3), request_id="a")
    with pytest.raises(BadRequest, match="empty"):
        world.add([])
    request = Request(
        request_id="i", prompt_token_ids=(1,), params=SamplingParams(), images=("picture",)
    )
    with pytest.raises(Unsupported, match="images"):
        world.scheduler.add(request, seed=0, max_total_tokens=3)
    world.drain()


# --- prefix cache --------------------------------------------------------------------------------


def computed_rows(world, *args, **kwargs):
    before = world.num_rows
    world.add(*args, **kwargs)
    world.drain()
    return world.num_rows - before


def test_a_hit_covers_full_blocks_but_never_the_last_token():
    world = World(make_scheduler((None, 40), budget=100))
    assert computed_rows(world, prompt(16), max_tokens=1) == 16
    assert computed_rows(world, prompt(16), max_tokens=1) == 4
    assert computed_rows(world, prompt(15), max_tokens=1) == 3
    (sequence,) = world.add(prompt(18), max_tokens=1)
    world.drain()
    assert sequence.num_cached_tokens == 16
    assert world.scheduler.prefix_queries == 16 + 16 + 15 + 18
    assert world.scheduler.prefix_hits == 12 + 12 + 16


def test_generated_tokens_are_found_too():
    world = World(make_scheduler((None, 40), budget=100))
    (first,) = world.add(prompt(6), max_tokens=7, **ENDLESS)
    world.drain()
    (again,) = world.add([*first.tokens, 3], max_tokens=1)
    world.drain()
    assert again.num_cached_tokens == 12


@pytest.mark.parametrize(
    "change",
    [
        {"salt": "other"},
        {"adapters": (AdapterUse(generation="g", kv_digest="k"),)},
        {"prompt_logprobs": 0},
    ],
)
def test_no_hit_under_another_key_or_where_every_row_must_be_computed(change):
    world = World(make_scheduler((None, 40), budget=100))
    computed_rows(world, prompt(16), max_tokens=1)
    assert computed_rows(world, prompt(16), max_tokens=1, **change) == 16
    assert world.scheduler.prefix_hits == 0


def test_without_caching_nothing_is_found_or_counted():
    world = World(make_scheduler((None, 40), budget=100, caching=False))
    assert computed_rows(world, prompt(16), max_tokens=1) == 16
    assert computed_rows(world, prompt(16), max_tokens=1) == 16
    assert world.scheduler.prefix_queries == world.scheduler.prefix_hits == 0


def test_a_sliding_group_hits_with_its_window_alone():
    world = World(make_scheduler((None, 40), (5, 7), budget=4))
    computed_rows(world, prompt(40), max_tokens=1)
    # The sliding group cannot have kept 10 blocks, yet the last ones suffice.
    assert computed_rows(world, prompt(41), max_tokens=1) == 1


def test_a_hit_ends_where_the_sliding_group_lost_its_window():
    world = World(make_scheduler((None, 60), (5, 6), budget=4))
    computed_rows(world, prompt(20), max_tokens=1)
    computed_rows(world, prompt(24, 3), max_tokens=1)  # overwrites the sliding group's blocks
    assert computed_rows(world, prompt(20), max_tokens=1) == 20


def test_the_tail_of_a_finished_sequence_is_forgotten_before_its_head():
    world = World(make_scheduler((None, 10), budget=100))
    computed_rows(world, prompt(32), max_tokens=1)
    computed_rows(world, prompt(20, 4), max_tokens=1)  # 2 blank blocks and 3 from the tail
    assert computed_rows(world, prompt(32), max_tokens=1) == 32 - 20


# --- n > 1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("length", "own"), [(18, 2), (17, 1), (16, 4), (3, 3), (1, 1)])
def test_siblings_share_the_leaders_blocks_and_compute_only_the_rest(caching, length, own):
    world = World(make_scheduler((None, 40), budget=100, caching=caching))
    leader, *siblings = world.add(prompt(length), n=4, max_tokens=2, **ENDLESS)
    assert {s.state for s in siblings} == {SequenceState.FORKING}
    assert scheduled(world.step()) == {"r1.0": length}
    assert scheduled(world.step()) == {"r1.0": 1, "r1.1": own, "r1.2": own, "r1.3": own}
    world.drain()
    assert len({tuple(s.tokens) for s in (leader, *siblings)}) > 1


def test_siblings_share_a_sliding_window():
    world = World(make_scheduler((7, 40), budget=5, caching=False))
    world.add(prompt(31), n=3, max_tokens=5, **ENDLESS)
    while world.scheduler.num_running != 3:
        world.step()
    assert world.num_rows == 31 + 1 + 3 + 1  # leader's prompt and token, then parts of the rest
    world.drain()


def test_siblings_come_before_later_arrivals():
    world = World(make_scheduler((None, 40), budget=100, max_num_seqs=2))
    world.add(prompt(8), n=3, max_tokens=3, **ENDLESS)
    world.step()
    world.add(prompt(8, 3), request_id="later")
    assert scheduled(world.step()) == {"r1.0": 1, "r1.1": 4}
    world.drain()


def test_an_error_ends_all_sequences_of_its_request_and_no_other():
    world = World(make_scheduler((None, 40), budget=100))
    leader, *siblings = world.add(prompt(8), n=3, max_tokens=9, **ENDLESS)
    (other,) = world.add(prompt(8, 3), max_tokens=4, **ENDLESS)
    world.step()
    world.step()
    plan = world.plan()
    world.execute(plan)
    commits = world.commit(plan, failing=siblings[0])
    ended = [c for c in commits if c.error]
    assert {c.sequence for c in ended} == {leader, *siblings}
    assert {c.error for c in ended} == {("internal_error", "NaN")}
    assert {c.sequence for c in commits} - {c.sequence for c in ended} == {other}
    world.drain()
    assert other.finish_reason is FinishReason.LENGTH


def test_seeds_of_answers_are_fixed_and_all_different():
    seeds = [sequence_seed(seed, index) for seed in range(50) for index in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert sequence_seed(7, 0) == 7
    # First output of splitmix64 from state 1234567, as published with the algorithm.
    assert sequence_seed(1234567, 1) == 6457827717110365317
    assert all(0 <= seed < 2**64 for seed in seeds)


# --- preemption ----------------------------------------------------------------------------------


def starved(blocks, **config):
    world = World(make_scheduler((None, blocks), budget=100, **config))
    for i in range(2):
        world.add(prompt(9 - i, 3 * i), request_id="ab"[i], max_tokens=16, **ENDLESS)
    return world


@pytest.mark.parametrize("caching", [True, False])
def test_a_parked_sequence_loses_only_the_blocks_that_were_needed(caching):
    world = starved(8, caching=caching)
    a, b = world.live["a"][0], world.live["b"][0]
    while not b.num_preemptions:
        world.step()
    # a took one block of b's tail; the rest of b's blocks are kept.
    kept, tokens = len(b.block_ids[0]), len(b.tokens)
    assert kept * 4 < tokens <= (kept + 1) * 4 + 1
    assert b.num_computed_tokens == kept * 4
    assert (b.state, b.epoch, a.num_preemptions) == (SequenceState.WAITING, 1, 0)
    world.drain()
    # Alone each computes 9 + 15 and 8 + 15 rows; what is more was lost to a's growth.
    lost = world.num_rows - (24 + 23)
    assert 0 < lost <= (24 - 8) + 4


@pytest.mark.parametrize("blocks", [3, 4, 5])
def test_chunks_shrink_before_a_decode_row_misses_a_step(blocks):
    world = World(make_scheduler((None, 100), (4, blocks), budget=8, max_model_len=100))
    world.add(prompt(4), request_id="a", max_tokens=20, **ENDLESS)
    world.step()
    world.add(prompt(90, 5), request_id="long", priority=1, max_tokens=2)
    chunks = []
    while "a" in world.live:
        rows = scheduled(world.step())
        assert rows["a.0"] == 1
        chunks.append(rows.get("long.0", 0))
    assert min(chunks) < 7 == max(chunks)
    world.drain()


def test_without_need_nothing_is_computed_twice():
    world = starved(20)
    world.drain()
    assert world.num_rows == 24 + 23
    assert world.scheduler.num_preemptions == 0


def test_the_one_that_computed_least_parks():
    world = starved(8)
    a, b = world.live["a"][0], world.live["b"][0]
    world.drain()
    assert b.num_preemptions > 0
    assert a.num_preemptions == 0


def test_reclaimed_blocks_are_found_again_until_they_are_reused():
    world = World(make_scheduler((None, 8), budget=100))
    world.add(prompt(17), request_id="low", priority=1, max_tokens=8, **ENDLESS)
    world.step()
    (high,) = world.add(prompt(20, 5), request_id="high", max_tokens=1)
    before = world.num_rows
    world.step()
    (low,) = world.live["low"]
    assert (low.num_preemptions, high.finish_reason) == (1, FinishReason.LENGTH)
    assert world.num_rows - before == 20
    # `high` took 5 of 8 blocks, so three of low's were kept or can be found.
    assert scheduled(world.step()) == {"low.0": len(low.tokens) - 1 - 12}
    world.drain()
    # What was computed again is found again.
    assert computed_rows(world, prompt(17), max_tokens=1) == 1


def test_own_blocks_that_stand_in_the_way_of_a_hit_are_given_up():
    world = World(make_scheduler((None, 6), budget=6, max_num_seqs=1))
    (low,) = world.add(prompt(23), request_id="low", priority=1, max_tokens=1)
    world.step()
    world.add(prompt(17), request_id="high", priority=0, max_tokens=1)
    while "high" in world.live:
        world.step()
    # One full block and a part of another are low's own, three more can be found, and the sixth
    # block is missing as long as low keeps that part.
    assert low.num_computed_tokens == 6
    assert scheduled(world.step()) == {"low.0": 6}
    assert low.num_computed_tokens == 16 + 6
    world.drain()


def test_a_strictly_better_priority_takes_the_place_of_the_worst():
    world = World(make_scheduler((None, 100), budget=100, max_num_seqs=2))
    world.add(prompt(4), request_id="p1", priority=1, max_tokens=20, **ENDLESS)
    world.add(prompt(4, 2), request_id="p2", priority=2, max_tokens=20, **ENDLESS)
    world.step()
    world.add(prompt(4, 3), request_id="p0", priority=0, max_tokens=2, **ENDLESS)
    plan = world.step()
    assert scheduled(plan) == {"p1.0": 1, "p0.0": 4}
    assert [s.request.request_id for s in plan.preempted] == ["p2"]
    world.step()
    assert scheduled(world.step()) == {"p1.0": 1, "p2.0": 1}  # parked, and lost nothing
    world.drain()


def test_equals_never_park_each_other_to_be_admitted():
    world = World(make_scheduler((None, 6), budget=100, max_num_seqs=4))
    world.add(prompt(12), max_tokens=8, **ENDLESS)
    world.step()
    for i in range(5):
        world.add(prompt(16, i), max_tokens=2, **ENDLESS)
    world.drain()
    assert world.scheduler.num_preemptions == 0


def test_nobody_parks_for_a_request_that_would_not_fit_even_so():
    world = World(make_scheduler((None, 10), budget=100))
    world.add(prompt(16), request_id="equal", priority=0, max_tokens=9, **ENDLESS)
    world.add(prompt(8, 2), request_id="worse", priority=1, max_tokens=4, **ENDLESS)
    world.step()
    world.add(prompt(27, 5), request_id="big", priority=0, max_tokens=1)
    assert scheduled(world.step()) == {"equal.0": 1, "worse.0": 1}
    assert world.scheduler.num_preemptions == 0
    world.drain()


def test_drafts_are_dropped_before_anyone_loses_work():
    world = World(make_scheduler((None, 6), budget=100))
    (a,) = world.add(prompt(10), max_tokens=9, **ENDLESS)
    world.add(prompt(11, 4), max_tokens=2, **ENDLESS)
    world.step()
    a.drafts[:] = [1] * 7  # one has a slot, the others would take blocks that are not there
    assert scheduled(world.plan()) == {"r1.0": 2, "r2.0": 1}
    assert world.scheduler.num_preemptions == 0


# --- endings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_without_output_ends_once_it_is_computed(n):
    world = World(make_scheduler((None, 40), budget=5))
    sequences = world.add(prompt(12), max_tokens=0, n=n, prompt_logprobs=0)
    while (plan := world.step()) is not None:
        assert all(span.num_samples == 0 for span in plan.spans)
    assert {s.finish_reason for s in sequences} == {FinishReason.LENGTH}
    assert all(s.num_output_tokens == 0 for s in sequences)


def test_a_deadline_ends_waiting_running_and_forking_sequences_with_the_reason():
    world = World(make_scheduler((None, 40), budget=4, max_num_seqs=1))
    forking = world.add(prompt(12), n=2, deadline_s=5.0)
    waiting = world.add(prompt(12), deadline_s=4.0)
    (kept,) = world.add(prompt(3), deadline_s=50.0)
    world.step()
    world.now_s = 5.0
    plan = world.plan()
    assert set(plan.finished) == {*forking, *waiting}
    assert {s.failure[0] for s in plan.finished} == {"deadline_exceeded"}
    assert [s.sequence for s in plan.spans] == [kept]


def test_a_plan_may_hold_only_endings_and_the_next_is_none():
    world = World(make_scheduler((None, 40)))
    world.add(prompt(12), deadline_s=1.0)
    world.now_s = 2.0
    plan = world.plan()
    assert (len(plan.finished), plan.spans) == (1, ())
    assert world.plan() is None


def test_tokens_after_the_stop_are_dropped_with_their_logprobs():
    scheduler = make_scheduler((None, 40), budget=100)
    request = Request(request_id="r", prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=20))
    (sequence,) = scheduler.add(request, seed=0, max_total_tokens=22)

    def commit(tokens):
        result = SpanResult(token_ids=tokens, logprobs=tuple(f"logprob {t}" for t in tokens))
        stop = lambda seq, token: (FinishReason.STOP, "end") if token == 6 else None  # noqa: E731
        return scheduler.commit(plan, StepResult(spans=(result,)), stop)

    plan = scheduler.plan(0.0)
    commit((4,))
    sequence.drafts[:] = [5, 6, 7]
    plan = scheduler.plan(0.0)
    (done,) = commit((5, 6, 7, 8))
    assert done.token_ids == (5, 6)
    assert done.logprobs == ("logprob 5", "logprob 6")
    assert (sequence.finish_reason, sequence.stop_reason) == (FinishReason.STOP, "end")
    assert sequence.tokens == [1, 2, 4, 5, 6]


@pytest.mark.parametrize(
    "result",
    [
        SpanResult(),
        SpanResult(token_ids=(1, 2)),
        SpanResult(token_ids=(1,), prompt_logprobs=("one",)),
    ],
)
def test_a_result_that_cannot_be_ends_its_request_alone(result):
    world = World(make_scheduler((None, 40), budget=100))
    (bad,) = world.add(prompt(4))
    (good,) = world.add(prompt(4, 2))
    plan = world.plan()
    results = (result, world._result(plan.spans[1]))
    commits = world.scheduler.commit(plan, StepResult(spans=results), lambda *_: None)
    assert [c.sequence for c in commits if c.error] == [bad]
    assert good.num_output_tokens == 1


def test_results_of_another_plan_are_refused():
    world = World(make_scheduler((None, 40)))
    world.add(prompt(4))
    old = world.plan()
    new = world.plan()
    with pytest.raises(ValueError, match="last plan"):
        world.commit(old)
    world.execute(new)
    world.commit(new)


def test_figures_follow_the_work():
    world = World(make_scheduler((None, 10), budget=100, max_num_seqs=1))
    scheduler = world.scheduler
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_usage) == (0, 0, 0.0)
    world.add(prompt(20), n=2, max_tokens=3, **ENDLESS)
    world.add(prompt(4), max_tokens=3, **ENDLESS)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    world.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    assert scheduler.kv_usage == pytest.approx(0.5)
    world.drain()
