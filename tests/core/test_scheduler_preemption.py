"""Who gives up what when blocks run out, one rule a test.

On the simulated KV cache of `support.scheduler_world`.
"""

import pytest
from support.scheduler_world import World, computed_rows
from support.schedulers import ENDLESS, make_scheduler, prompt, scheduled

from plait.platform.core import FinishReason, SequenceState


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
