"""How long a source that must spend ahead is let go on, and what that may cost."""

import pytest

from plait.speculative.following import SHARE, SLACK, TRIAL_DRAFTS, TRIAL_STEPS, Following

STEP_S = 0.008


def run(following, num_steps, *, cost_s, gain_s, judged, sequence_steps=100):
    """Sequences one after the other; returns what following them cost in the end, net."""
    net_s, follows = 0.0, False
    for step in range(num_steps):
        if step % sequence_steps == 0:
            follows = following.takes_on
        elif follows:
            follows = following.stays
        spent = cost_s if follows else 0.0
        gained = gain_s if follows else 0.0
        net_s += spent - gained
        following.step(
            STEP_S + spent, cost_s=spent, gain_s=gained, num_judged=judged if follows else 0
        )
    return net_s


def test_what_earns_more_than_it_costs_is_followed_always():
    following = Following()
    net_s = run(following, 5000, cost_s=0.0015, gain_s=0.002, judged=2)
    assert net_s == pytest.approx(-5000 * 0.0005)
    assert following.takes_on


@pytest.mark.parametrize("judged", [0, 1], ids=["nothing is ever judged", "all is wrong"])
@pytest.mark.parametrize("cost_s", [0.0002, 0.0015, 0.008])
def test_what_earns_nothing_costs_a_short_trial_and_then_a_hundredth(cost_s, judged):
    following = Following()
    trial_s = run(following, 200, cost_s=cost_s, gain_s=0.0, judged=judged)
    most_s = max(TRIAL_STEPS * 2 * STEP_S, TRIAL_DRAFTS * cost_s)
    assert trial_s <= most_s + (SHARE + SLACK) * 200 * 2 * STEP_S
    later_s = run(following, 4000, cost_s=cost_s, gain_s=0.0, judged=judged)
    assert later_s <= (SHARE + SLACK) * 4000 * STEP_S + 2 * cost_s


def test_a_trial_goes_on_until_enough_is_judged():
    """What pays late, after prompts say, is not given up before it was seen."""
    following = Following()
    for _ in range(4):
        following.step(STEP_S, cost_s=STEP_S, gain_s=0.0, num_judged=0)
    assert following.stays
    for _ in range(60):
        following.step(STEP_S, cost_s=0.001, gain_s=0.004, num_judged=2)
    assert following.takes_on


def test_what_stops_paying_is_left_and_tried_again_later():
    following = Following()
    run(following, 300, cost_s=0.001, gain_s=0.0012, judged=2)
    run(following, 3000, cost_s=0.002, gain_s=0.0, judged=2)
    assert not following.takes_on
    for _ in range(6000):
        following.step(STEP_S, cost_s=0.0, gain_s=0.0, num_judged=0)
    assert following.takes_on
