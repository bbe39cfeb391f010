"""Who runs with which adapter, and when, on a simulated cache and with loads that run when told."""

import pytest
from support.adapter_world import DRAIN_S, AdapterWorld

from plait.platform.core import AdapterUse, FinishReason, SequenceState

ENDLESS = {"ignore_eos": True}


@pytest.fixture
def world(tmp_path):
    return AdapterWorld(tmp_path, max_num_seqs=6, budget=64)


def load(world, **sizes):
    """Have generations of these device bytes read and checked."""
    for name, size in sizes.items():
        world.pool.load(world.files.write(name, device_bytes=size))
    settle(world)
    answers = world.pool.take_answers()
    assert [a.error for a in answers] == [None] * len(sizes)


def settle(world):
    while world.pool.busy and (world.loads.jobs or world.placings.jobs):
        world.between_steps()
        world.strand.begin(world.now_s)


def use(*names):
    return tuple(AdapterUse(generation=name, kv_digest=name) for name in names)


def running(world):
    return {s.request.request_id for s in world.scheduler._sequences.running}


def test_a_cold_adapter_is_passed_over_while_others_run(world):
    load(world, a=12, b=12, c=12)
    world.add([1, 2], request_id="a", adapters=use("a"), max_tokens=9, **ENDLESS)
    world.add([1, 2], request_id="c", adapters=use("c"), max_tokens=9, **ENDLESS)
    world.add([1, 2], request_id="b", adapters=use("b"), max_tokens=2, **ENDLESS)
    world.add([1, 2], request_id="base", max_tokens=9, **ENDLESS)
    world.step()
    assert running(world) == {"a", "b", "base"}
    world.drain()
    assert world.files.num_loads == {"a": 1, "b": 1, "c": 1}


def test_a_hot_adapter_gives_way_within_the_threshold_and_its_longest_sequence(world):
    load(world, hot=20, cold=16)
    step_s, longest = 0.25, 12

    def keep_hot():
        while sum(r.startswith("hot") for r in world.live) < 5:
            world.num_hot = getattr(world, "num_hot", 0) + 1
            name, tokens = f"hot{world.num_hot}", longest - world.num_hot % 5
            world.add([1, 2], request_id=name, adapters=use("hot"), max_tokens=tokens, **ENDLESS)

    for _ in range(10):
        keep_hot()
        world.step()
        world.between_steps()
    (cold,) = world.add([3], request_id="cold", adapters=use("cold"), max_tokens=2, **ENDLESS)
    began = world.now_s
    while cold.state is SequenceState.WAITING:
        keep_hot()
        world.step()
        world.between_steps()
        assert world.now_s - began <= DRAIN_S + (longest + 6) * step_s, "starved"
    assert world.now_s - began > DRAIN_S
    world.drain()


def test_those_that_need_two_take_both_or_none(world):
    load(world, a=12, b=12, c=12, d=12)
    for i in range(12):
        pair = [("a", "b"), ("c", "d"), ("b", "c"), ("d", "a")][i % 4]
        world.add([1, i % 7], adapters=use(*pair), max_tokens=6, **ENDLESS)
    world.drain()
    assert all(s.finish_reason is FinishReason.LENGTH for s in world.ended.values())


def test_every_one_of_many_adapters_gets_its_turn(world):
    names = [f"n{i}" for i in range(12)]
    load(world, **dict.fromkeys(names, 8))
    for i in range(60):
        world.add([1 + i % 9], adapters=use(names[i % 12]), max_tokens=4, **ENDLESS)
    steps = world.drain()
    assert steps < 300
    assert world.pool.tiers.num_evictions >= 9
    assert {s.finish_reason for s in world.ended.values()} == {FinishReason.LENGTH}


def test_what_can_never_fit_is_refused_with_the_numbers(world):
    load(world, a=12, b=12, c=12)
    world.refusals = {"lora_byte_limit_exceeded"}
    (one,) = world.add([1], adapters=use("a", "b", "c"))
    world.drain()
    assert one.finish_reason is FinishReason.ERROR
    assert "36 bytes at once" in one.failure[1]


def test_a_generation_that_is_unknown_is_refused_and_never_base_output(world):
    world.refusals = {"lora_adapter_not_found"}
    (one,) = world.add([1], adapters=use("nobody"))
    (other,) = world.add([1], max_tokens=2, **ENDLESS)
    world.drain()
    assert (one.failure[0], one.num_output_tokens) == ("lora_adapter_not_found", 0)
    assert other.finish_reason is FinishReason.LENGTH


def test_what_is_dropped_stays_until_its_last_sequence_ends(world):
    load(world, a=12)
    sequences = world.add([1, 2], n=3, adapters=use("a"), max_tokens=5, **ENDLESS)
    world.step()
    world.step()
    world.pool.drop("a")
    assert "a" in world.places.placed
    world.drain()
    assert all(s.finish_reason is FinishReason.LENGTH for s in sequences)
    assert not world.places.placed
    assert (world.pool.tiers.device_bytes, world.pool.tiers.host_bytes) == (0, 0)


def test_the_pinned_stay_and_more_than_fit_are_refused(world):
    load(world, a=14, b=8, c=8)
    world.pool.pin("a", pinned=True)
    settle(world)
    world.pool.load(world.files.write("d", device_bytes=12))
    message = world.files.write("d", device_bytes=12)
    message.pinned = True
    world.pool.load(message)
    settle(world)
    codes = {answer.error and answer.error[0] for answer in world.pool.take_answers()}
    assert codes == {"lora_byte_limit_exceeded"}
    for name in "bcbc":
        world.add([1], adapters=use(name), max_tokens=2, **ENDLESS)
        world.drain()
    assert "a" in world.places.placed


def test_the_first_of_a_flow_runs_with_what_is_kept_ready_for_another_of_it(world):
    """Else it waits for a drain that waits for the claim of one behind it: nothing ever ran."""
    load(world, a=16, b=16)
    world.add([1], adapters=use("b"), max_tokens=2, **ENDLESS)
    world.drain()
    world.add([1], request_id="claims a", adapters=use("a"), max_tokens=2, **ENDLESS)
    world.step()
    world.add([1], request_id="waits for b", adapters=use("b"), max_tokens=2, **ENDLESS)
    world.step()
    world.now_s += DRAIN_S + 1  # a takes its time, and b's turn has come: a is drained for it
    world.step()
    world.add([1], adapters=use("a"), priority=-1, max_tokens=2, **ENDLESS)
    world.drain()
    assert {s.finish_reason for s in world.ended.values()} == {FinishReason.LENGTH}


def test_asking_in_vain_for_one_that_is_loaded_takes_it_from_nobody(world):
    """Who was told that it is loaded goes on naming it: it comes once it can be placed again."""
    load(world, a=16, b=16)
    world.add([1], adapters=use("b"), max_tokens=2, **ENDLESS)
    world.drain()
    world.places.refused.add("a")
    again = world.files.write("a", device_bytes=16)
    again.pinned = True
    world.pool.load(again)
    settle(world)
    for _ in range(4):
        world.step()
        world.between_steps()
    (answer,) = world.pool.take_answers()
    assert answer.error is not None
    world.places.refused.clear()
    world.add([1], adapters=use("a"), max_tokens=2, **ENDLESS)
    world.drain()
    assert {s.finish_reason for s in world.ended.values()} == {FinishReason.LENGTH}
