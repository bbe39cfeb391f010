"""How requests and sequences end, one rule a test.

On the simulated KV cache of `support.scheduler_world`.
"""

import pytest
from support.scheduler_world import World
from support.schedulers import ENDLESS, make_scheduler, prompt

from plait.platform.core import FinishReason, Request, SamplingParams, SpanResult, StepResult


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
