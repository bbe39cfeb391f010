"""Which rows a step has and who is admitted, one rule a test.

On the simulated KV cache of `support.scheduler_world`.
"""

import random

import pytest
from support.scheduler_world import World
from support.schedulers import ENDLESS, make_scheduler, prompt, scheduled

from plait.platform.core import (
    Request,
    SamplingParams,
    SequenceState,
)
from plait.platform.errors import BadRequest, ContextLengthExceeded, Overloaded, Unsupported

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
        alone = world.scheduler._allocator.slots_alone(forks=n > 1)
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
