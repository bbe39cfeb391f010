"""Who is served next: shares between flows, order within one."""

from collections import Counter

import pytest
from support.scheduler_world import World
from support.schedulers import make_scheduler

from plait.platform.core import AdapterUse, FinishReason, SequenceState
from plait.platform.scheduling.planner import MAX_PASSED_OVER
from plait.platform.strand import Strand

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


class OneFirst(Strand):
    """Ready for one tenant, and for the others once that one has ended."""

    def __init__(self, tenant):
        self._tenant = tenant
        self._ended = False

    @property
    def busy(self):
        return not self._ended

    def admit(self, sequence):
        return self._ended or sequence.request.tenant == self._tenant

    def release(self, sequence):
        ended = sequence.state is SequenceState.FINISHED
        self._ended |= ended and sequence.request.tenant == self._tenant


def test_the_one_that_may_run_is_found_behind_more_flows_than_are_passed_over_beside_work():
    strands = (OneFirst("last"),)
    world = World(make_scheduler((None, 100), max_num_seqs=8, max_num_queued=1000, strands=strands))
    tenants = [f"t{i}" for i in range(MAX_PASSED_OVER + 5)] + ["last"]
    for tenant in tenants:
        world.add([1], tenant=tenant, max_tokens=1, **ENDLESS)
    world.drain()
    assert {s.finish_reason for s in world.ended.values()} == {FinishReason.LENGTH}


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
