"""Numbers about numbers: percentiles, medians and ratios, with no other package."""

from __future__ import annotations

import math
from collections.abc import Sequence

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` % of `values` lie, interpolated between neighbours.

    The same as `numpy.percentile`; nan where there are no values.
    """
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle value; nan where there are none."""
    return percentile(values, 50)


def summary(values: Sequence[float], *, scale: float = 1.0) -> dict[str, float]:
    """Mean and percentiles, each times `scale`."""
    if not values:
        return {"mean": math.nan} | {f"p{p}": math.nan for p in PERCENTILES}
    mean = sum(values) / len(values)
    return {"mean": mean * scale} | {f"p{p}": percentile(values, p) * scale for p in PERCENTILES}


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times `theirs` the median of `ours` is; nan where either is missing or zero."""
    base = median(theirs)
    return median(ours) / base if base else math.nan


def ratio_in_turns(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times `theirs` `ours` is, of measurements taken in turns: the median over the pairs.

    What a machine does to both of a pair, such as a slower clock, does not count. nan where nothing
    was measured, or zero.
    """
    pairs = list(zip(ours, theirs, strict=True))
    if not pairs or not all(base for _, base in pairs):
        return math.nan
    return median([one / base for one, base in pairs])
