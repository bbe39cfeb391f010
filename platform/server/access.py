"""Who may use what: the line of a key, and what comes of it for a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

MAX_WEIGHT = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A key with what it may use. In a file: `KEY adapters=sql-*,tone weight=2`."""

    key: str = field(repr=False)
    adapters: tuple[str, ...] | None = None  # names or patterns (*, ?); None: all
    weight: float = 1.0  # its share of the engine against other keys'

    @classmethod
    def parse(cls, line: str) -> Grant:
        """One line of a key file. Raises `ValueError` that says what is wrong, without the key."""
        key, *options = line.split()
        adapters, weight = None, 1.0
        for option in options:
            name, separator, text = option.partition("=")
            if name == "adapters" and separator:
                adapters = tuple(filter(None, text.split(",")))
            elif name == "weight" and separator:
                weight = _weight(text)
            else:
                raise ValueError("a key is followed by adapters=… or weight=… and nothing else")
        return cls(key=key, adapters=adapters, weight=weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What one request may do, by the key that it brought."""

    key_digest: str = ""  # SHA-256 of the key; empty: it brought none
    adapters: tuple[str, ...] | None = None
    weight: float = 1.0
    is_admin: bool = False  # it may change what is loaded

    def may_use(self, adapter: str) -> bool:
        """Whether the adapter of that name exists for this caller."""
        allowed = self.adapters
        return allowed is None or any(fnmatchcase(adapter, pattern) for pattern in allowed)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise ValueError(f"weight is a number above 0 and at most {MAX_WEIGHT:g}")
    return weight
