"""Who is served next: shares between flows, order within one."""

from collections import Counter

import pytest
from support.scheduler_world import World
from support.schedulers import make_scheduler

from plait.platform.core import AdapterUse

ENDLESS = {"ignore_eos": True}


def first_tokens(world, num_steps):
    """Tenants' generated tokens within some steps of a backlog."""
    given = Counter()
    for _ in range(num_steps):
        plan = world.step()
        for span in plan.spans:
            given[span.sequence.request.tenant] += 2 * bool(span.num_samples)
            if span.start == 0:
                given[span.sequence.request.tenant] += span.num_tokens
    return given


@pytest.mark.parametrize("share", [1.0, 3.0])
def test_backlogged_tenants_get_work_by_their_shares(share):
    world = World(make_scheduler((None, 100), max_num_seqs=4, max_num_queued=1000, budget=64))
    for i in range(200):
        world.add([1, 2, 3], tenant="many", max_tokens=4, **ENDLESS)
        if i < 100:
            world.add([1, 2], tenant="few", share=share, max_tokens=6, **ENDLESS)
    given = first_tokens(world, 120)
    assert given["few"] / given["many"] == pytest.approx(share, rel=0.15)


def test_adapters_of_one_tenant_are_flows_of_their_own():
    world = World(make_scheduler((None, 100), max_num_seqs=1, budget=64))
    for _ in range(20):
        world.add([1], max_tokens=1, **ENDLESS)
    adapters = (AdapterUse(generation="g"),)
    (late,) = world.add([1], adapters=adapters, max_tokens=1, **ENDLESS)
    world.step()
    world.step()
    assert late.finish_reason is not None


def test_a_tenant_gains_nothing_from_many_adapters():
    world = World(make_scheduler((None, 100), max_num_seqs=4, max_num_queued=1000, budget=64))
    for i in range(200):
        adapters = (AdapterUse(generation=f"g{i % 10}"),)
        world.add([1, 2], tenant="ten", adapters=adapters, max_tokens=4, **ENDLESS)
        world.add([1, 2], tenant="one", max_tokens=4, **ENDLESS)
    given = first_tokens(world, 80)
    assert given["one"] / given["ten"] == pytest.approx(1.0, rel=0.1)


def test_who_comes_back_gains_nothing_from_its_absence():
    world = World(make_scheduler((None, 100), max_num_seqs=1, budget=64))
    for _ in range(30):
        world.add([1], tenant="stays", max_tokens=2, **ENDLESS)
    for _ in range(30):
        world.step()
    for _ in range(10):
        world.add([1], tenant="returns", max_tokens=2, **ENDLESS)
    order = []
    for _ in range(20):
        order += [s.sequence.request.tenant for s in world.step().spans if s.start == 0]
    assert 4 <= order.count("returns") <= 6


def test_one_flow_is_served_by_arrival_and_what_ran_before_goes_first():
    world = World(make_scheduler((None, 6), max_num_seqs=3, budget=64))
    order = []
    for i in range(6):
        world.add([1 + i, 2, 3], request_id=str(i), max_tokens=14, **ENDLESS)
    while (plan := world.step()) is not None:
        for span in plan.spans:
            request_id = span.sequence.request.request_id
            if request_id not in order:
                order.append(request_id)
    assert order == sorted(order)
    assert world.scheduler.num_preemptions > 0
