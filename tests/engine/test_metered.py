"""Where the steps' time goes: what is booked under which part, and what leaves as metrics."""

from types import SimpleNamespace

import numpy as np
import torch

from plait.platform.metered import FORWARD, HEAD, Metered


class Clock:
    """Stands still but when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def count(phase, rows, nanoseconds, num_bytes=0, operations=0):
    return SimpleNamespace(
        phase=phase, rows=rows, nanoseconds=nanoseconds, num_bytes=num_bytes, operations=operations
    )


class Native:
    """Takes 3 s a step, of which it can explain 2."""

    head_bytes = 100

    def __init__(self, clock):
        self._clock, self._steps = clock, 0

    def forward(self, batch, embeds=None):
        self._clock.now += 3.0
        self._steps += 1
        return torch.zeros(batch, 4)

    def forward_tapped(self, batch, taps, embeds=None):
        return self.forward(batch), torch.zeros(batch, 4)

    def logits(self, hidden, rows):
        self._clock.now += 0.5
        return torch.zeros(len(rows), 10)

    def phase_counts(self):
        second = self._steps * 1_000_000_000
        return [
            count("qkv_proj", "1", second // 2, 64, 128),
            count("qkv_proj", "2-8", second // 2, 64, 256),
            count("attention", "1", second, 7, 0),
        ]


def test_parts_add_up_to_the_step():
    clock = Clock()
    metered = Metered(Native(clock), clock)
    assert metered.phases() == {"qkv_proj": (0.0, 128, 384), "attention": (0.0, 7, 0)}
    hidden = metered.forward(2)
    metered.forward_tapped(2, (1,))
    metered.logits(hidden, np.array([0, 1]))
    phases = metered.phases()
    assert phases["qkv_proj"] == (2.0, 128, 384)
    assert phases["attention"] == (2.0, 7, 0)
    assert phases[FORWARD] == (2.0, 0, 0)  # two steps of three seconds, less what is explained
    assert phases[HEAD] == (0.5, 100, 2 * 2 * 10 * 4)


def test_an_executor_that_books_nothing_is_one_part():
    clock = Clock()
    native = Native(clock)
    plain = SimpleNamespace(forward=native.forward, logits=native.logits)
    metered = Metered(plain, clock)
    metered.logits(metered.forward(2), np.array([0]))
    assert metered.phases() == {FORWARD: (3.0, 0, 0), HEAD: (0.5, 0, 0)}


def test_an_old_answer_will_do_where_it_is_allowed():
    clock = Clock()
    metered = Metered(Native(clock), clock)
    metered.forward(1)
    old = metered.phases(max_age_s=1.0)
    clock.now += 0.9
    metered.logits(torch.zeros(1, 4), np.array([0]))
    assert metered.phases(max_age_s=2.0) == old
    assert HEAD in metered.phases()
