"""Whether a draft source shall spend on what pays only later.

A head spends on going along, from the first token of a prompt on; a draft model on catching up.
It is tried on whatever comes first, until enough of its drafts were judged or it has cost as much
as a few steps; from then on it goes on as long as it earns what it costs. A source that does not is
tried anew, for one two-hundredth of the time.
"""

from __future__ import annotations

TRIAL_DRAFTS = 64  # judged, until which it goes along though it does not earn what it costs
TRIAL_STEPS = 6  # whose time that may cost
SHARE = 0.005  # of the time, for trying again
SLACK = 0.005  # of the time, by which it may fall short before it leaves those it follows
HALF_LIFE = 4096  # steps after which costs and gains count half
_DECAY = 0.5 ** (1 / HALF_LIFE)


class Following:
    """Costs and gains of one source, fading."""

    def __init__(self) -> None:
        self._cost_s = self._gain_s = self._elapsed_s = self._num_steps = 0.0
        self._num_judged = 0

    def step(self, seconds: float, *, cost_s: float, gain_s: float, num_judged: int) -> None:
        """A step took `seconds`; `cost_s` was spent beside it, and drafts gained `gain_s`."""
        self._elapsed_s = self._elapsed_s * _DECAY + seconds
        self._num_steps = self._num_steps * _DECAY + 1
        self._cost_s = self._cost_s * _DECAY + cost_s
        self._gain_s = self._gain_s * _DECAY + gain_s
        self._num_judged += num_judged

    @property
    def takes_on(self) -> bool:
        """Whether to spend on a sequence for the first time."""
        return self._pays(SHARE)

    @property
    def stays(self) -> bool:
        """Whether to go on spending on one."""
        return self._pays(SHARE + SLACK)

    def _pays(self, share: float) -> bool:
        may_lose_s = share * self._elapsed_s
        if self._num_judged < TRIAL_DRAFTS:
            if not self._num_steps:
                return True
            may_lose_s += TRIAL_STEPS * self._elapsed_s / self._num_steps
        return self._cost_s <= self._gain_s + may_lose_s
