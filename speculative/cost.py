"""How long a step takes, by its rows.

A curve of seconds over rows is profiled at start, or guessed, and corrected by every step. A step's
time departs from it for two reasons that look alike: the machine is slower now (others use it, it
throttles), or the curve is wrong at this number of rows. The first is one factor for the whole
curve, the median of the last steps' ratios: no outlier moves it. The second is a factor of each
knot, learned slower and from what the first leaves. So a slow minute does not make the sizes that
were not run in it look cheap.

Where the sizes are padded to captured ones (`stairs`), a step costs what its stair costs and
nothing is interpolated: that would invent a price for rows that are free. Elsewhere, as with our
CPU kernels (SmolLM2 in bf16, one core: 36 ms and 5 to 6 ms for each row more), the curve is linear
between knots; those of 1 to 16 rows are single sizes, which keeps the tiles of 4 and 6 rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

KNOTS = (
    *range(1, 17),
    *(20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
)
# Without a profile a row more costs this share of a first one: dearer than any machine that we
# measured, so that drafts are few until steps have shown their price.
UNKNOWN_SLOPE = 0.3
_UNKNOWN_SECONDS = 0.02
# Steps whose median is the machine's present speed. An even number: of two kinds of steps that take
# turns it gives the middle, not the one that came last.
_WINDOW = 16
_PROFILE_WEIGHT = 5  # steps
_RATE = 0.08  # at which a knot follows, once it has been seen often
# The most that one step's logarithm of a ratio counts: outliers of ten times are common.
_CLIP, _CLIP_OF_GUESS = 0.2, 0.5
_REBUILT_EVERY = 16  # steps; building the table costs 40 µs

Floats = npt.NDArray[np.float64]


class _Curve:
    """Seconds at knots, for one kind of step, without the machine's present speed."""

    def __init__(
        self, knots: tuple[int, ...], base: Floats, *, is_stair: bool, is_guess: bool
    ) -> None:
        self._knots, self._base = knots, base
        self._is_stair, self._is_guess = is_stair, is_guess
        self._log = [0.0] * len(knots)
        self._seen = [0] * len(knots)
        self._num_changes = 0
        self.table: list[float] = []  # seconds of 0, 1, … rows
        self._build()

    def copy(self) -> _Curve:
        """The curve as it is now, as a guess at another kind of step."""
        return _Curve(self._knots, self._values(), is_stair=self._is_stair, is_guess=False)

    def seconds(self, rows: int) -> float:
        if rows < len(self.table):
            return self.table[rows]
        slope = (self.table[-1] - self.table[self._knots[-1] // 2]) / (self._knots[-1] / 2)
        return self.table[-1] + max(slope, 0.0) * (rows - len(self.table) + 1)

    def knot(self, rows: int) -> int:
        """Which knot's size, or the next smaller ones, `rows` is of."""
        return min(bisect_left(self._knots, rows), len(self._knots) - 1)

    def correct(self, rows: int, log_ratio: float, weight: float) -> None:
        """A step took `exp(log_ratio)` times what this curve says."""
        hi = self.knot(rows)
        clip = _CLIP_OF_GUESS if self._is_guess else _CLIP
        error = weight * min(max(log_ratio, -clip), clip)
        if self._is_stair or rows >= self._knots[hi] or not hi:
            self._follow(hi, error, 1.0)
        else:
            share = (rows - self._knots[hi - 1]) / (self._knots[hi] - self._knots[hi - 1])
            self._follow(hi, error, share)
            self._follow(hi - 1, error, 1 - share)
        self._num_changes += 1
        if self._num_changes <= _REBUILT_EVERY or not self._num_changes % _REBUILT_EVERY:
            self._build()

    def _follow(self, knot: int, error: float, share: float) -> None:
        if not self._seen[knot]:
            # What its neighbours taught is where it begins.
            self._log[knot] = float(self._logs()[knot])
        self._seen[knot] += 1
        self._log[knot] += max(_RATE, 1 / (self._seen[knot] + 2)) * share * error

    def _logs(self) -> Floats:
        """Corrections at all knots: unseen ones take those of the seen ones around."""
        seen = [k for k, num in enumerate(self._seen) if num]
        if not seen:
            return np.zeros(len(self._knots))
        at = [self._knots[k] for k in seen]
        return np.interp(self._knots, at, [self._log[k] for k in seen])

    def _values(self) -> Floats:
        values = self._base * np.exp(self._logs())
        seen = [k for k, num in enumerate(self._seen) if num]
        if self._is_guess and len(seen) > 1:
            values = _through(self._knots, seen, values)
        never_falling: Floats = np.maximum.accumulate(values)
        return never_falling

    def _build(self) -> None:
        rows = np.arange(self._knots[-1] + 1)
        values = self._values()
        if self._is_stair:
            table = values[np.searchsorted(self._knots, rows)]
        else:
            table = np.interp(rows, self._knots, values)
        self.table = table.tolist()


def _through(knots: tuple[int, ...], seen: list[int], values: Floats) -> Floats:
    """The line through the values at the seen knots; beyond them, as steep as from end to end."""
    at = np.array(knots, dtype=np.float64)
    first, last = seen[0], seen[-1]
    slope = max((values[last] - values[first]) / (at[last] - at[first]), 0.0)
    inside = np.interp(at, at[seen], values[seen])
    outside = np.maximum(at - at[last], 0) - np.maximum(at[first] - at, 0)
    result: Floats = np.maximum(inside + slope * outside, 0.1 * values[first])
    return result


class StepCost:
    """Seconds of steps by rows, with or without adapters, masks and rows of prompts.

    `profile` maps rows to seconds, as measured at start; `stairs` are the sizes that steps are
    padded to, if they are. What one kind of step was never seen to cost is what a plain one does.
    """

    def __init__(
        self, profile: Mapping[int, float] | None = None, *, stairs: SequenceOf[int] = ()
    ) -> None:
        knots = tuple(sorted(set(stairs))) or KNOTS
        base = _base(knots, profile or {})
        plain = _Curve(knots, base, is_stair=bool(stairs), is_guess=not profile)
        self._curves = {(False, False, False): plain}
        # A profile counts as some steps of its own: the first real one may be an outlier.
        trusted = [(0.0, (plain, -1))] * (_PROFILE_WEIGHT if profile else 0)
        self._recent: deque[tuple[float, tuple[_Curve, int]]] = deque(trusted, maxlen=_WINDOW)
        self._speed = 1.0

    def seconds(
        self, rows: int, *, adapters: bool = False, masks: bool = False, prompts: bool = False
    ) -> float:
        """How long a step of `rows` rows takes; `prompts`: most of them belong to prompts."""
        return self._curve(adapters, masks, prompts).seconds(rows) * self._speed

    def ladder(
        self,
        rows: int,
        num_more: int,
        *,
        adapters: bool = False,
        masks: bool = False,
        prompts: bool = False,
    ) -> list[float]:
        """Seconds of `rows`, `rows` + 1, … `rows` + `num_more` rows. Never falls."""
        curve, speed = self._curve(adapters, masks, prompts), self._speed
        if rows + num_more < len(curve.table):
            return [s * speed for s in curve.table[rows : rows + num_more + 1]]
        return [curve.seconds(rows + i) * speed for i in range(num_more + 1)]

    def measured(
        self,
        rows: int,
        seconds: float,
        *,
        adapters: bool = False,
        masks: bool = False,
        prompts: bool = False,
    ) -> None:
        """A step took `seconds`."""
        if rows < 1 or not 0 < seconds < math.inf:
            return
        curve = self._curves.get((adapters, masks, prompts))
        if curve is None:
            curve = self._curve(adapters, masks, prompts).copy()
            self._curves[adapters, masks, prompts] = curve
        log_ratio = math.log(seconds / curve.seconds(rows))
        place = (curve, curve.knot(rows))
        self._recent.append((log_ratio, place))
        ratios = sorted([ratio for ratio, _ in self._recent])
        half = len(ratios) // 2
        median = (ratios[half] + ratios[~half]) / 2
        self._speed = math.exp(median)
        # Steps of one size alone tell of the machine only: were the curve to follow them, its
        # visited knot would drift away from all others.
        same = [at for _, at in self._recent].count(place) / len(self._recent)
        if same < 1:
            curve.correct(rows, log_ratio - median, 1 - same)

    def _curve(self, adapters: bool, masks: bool, prompts: bool) -> _Curve:
        """The curve of this kind, or else of the nearest plainer kind that was seen."""
        curves = self._curves
        return (
            curves.get((adapters, masks, prompts))
            or curves.get((adapters, masks, False))
            or curves.get((adapters, False, False))
            or curves[False, False, False]
        )


def _base(knots: tuple[int, ...], profile: Mapping[int, float]) -> Floats:
    """Seconds at the knots: linear between profiled sizes, and beyond the last as before it."""
    sizes = sorted(profile)
    if not sizes:
        return _UNKNOWN_SECONDS * (1 + UNKNOWN_SLOPE * (np.array(knots, dtype=np.float64) - 1))
    seconds = np.maximum.accumulate([profile[size] for size in sizes])
    values = np.interp(knots, sizes, seconds)
    if len(sizes) > 1:
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    else:
        slope = UNKNOWN_SLOPE * seconds[0]
    beyond = np.maximum(np.array(knots) - sizes[-1], 0)
    result: Floats = values + beyond * slope
    return result
