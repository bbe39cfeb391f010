"""What a request finds of earlier ones and shares with its siblings.

On the simulated KV cache of `support.scheduler_world`.
"""

import pytest
from support.scheduler_world import World, computed_rows
from support.schedulers import ENDLESS, make_scheduler, prompt, scheduled

from plait.platform.core import AdapterUse, FinishReason, SequenceState
from plait.platform.scheduling.admission import sequence_seed

# --- prefix cache --------------------------------------------------------------------------------


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
