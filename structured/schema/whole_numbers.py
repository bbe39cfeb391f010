"""Whole numbers between bounds as a regular expression, each in its one spelling."""

from __future__ import annotations


def between(low: int | None, high: int | None) -> str:
    """The numbers from `low` to `high`, both included; None: without end. Empty where none is."""
    parts = []
    if low is None or low < 0:
        least = 1 if high is None else max(1, -high)
        parts += [f"-(?:{part})" for part in _counting(least, None if low is None else -low)]
    if (low is None or low <= 0) and (high is None or high >= 0):
        parts.append("0")
    if high is None or high > 0:
        parts += _counting(1 if low is None else max(1, low), high)
    return "|".join(parts)


def _counting(low: int, high: int | None) -> list[str]:
    """Above zero, by how many digits there are."""
    if high is not None and low > high:
        return []
    few, many = len(str(low)), None if high is None else len(str(high))
    if few == many:
        return [_alike(str(low), str(high))]
    found = [_alike(str(low), "9" * few)]
    if many is None:
        return [*found, f"[1-9][0-9]{{{few},}}"]
    if many > few + 1:
        found.append(f"[1-9][0-9]{{{few},{many - 2}}}")
    return [*found, _alike("1" + "0" * (many - 1), str(high))]


def _alike(low: str, high: str) -> str:
    """Between numbers of as many digits."""
    if low == high:
        return low
    if low[0] == high[0]:
        return low[0] + f"(?:{_alike(low[1:], high[1:])})"
    more = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts = []
    if set(low[1:]) - {"0"}:
        parts.append(f"{first}(?:{_alike(low[1:], '9' * more)})")
        first += 1
    if set(high[1:]) - {"9"}:
        parts.append(f"{last}(?:{_alike('0' * more, high[1:])})")
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{more}}}" if more else ""))
    return "|".join(parts)
