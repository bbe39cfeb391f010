"""Regular expressions from configs: PEFT's matching of names, in bounded time.

A pattern comes from a file that nobody has checked, and one of a few characters can keep Python's
`re` busy for years; the `regex` module matches the same language with a time limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import regex

from plait.platform.errors import InvalidAdapter

_MAX_LENGTH = 8192
_TIMEOUT_S = 0.25  # real patterns take microseconds
_TAIL = re.compile(r"(?<![\\\w])\w+\Z")


@dataclass(frozen=True)
class Pattern:
    """A checked pattern and the key of the config that it stands under."""

    key: str
    text: str

    def match_whole(self, name: str) -> bool:
        """Whether it is the pattern of the whole name."""
        return self._match(self._whole, name) is not None

    def match_suffix(self, name: str) -> bool:
        """Whether it is the pattern of the name, or of what follows one of its dots."""
        return name.endswith(self._tail) and self._match(self._suffix, name) is not None

    def layer(self, name: str) -> int | None:
        """The number that follows the first match and a dot, as layers have it in names."""
        found = self._match(self._layer, name)
        return None if found is None else int(found.group("idx"))

    # Compiled once each: some configs have a pattern for every module.

    @cached_property
    def _whole(self) -> regex.Pattern[str]:
        return regex.compile(rf"(?:{self.text})\Z")

    @cached_property
    def _suffix(self) -> regex.Pattern[str]:
        return regex.compile(rf"(.*\.)?({self.text})$")

    @cached_property
    def _layer(self) -> regex.Pattern[str]:
        return regex.compile(rf"(?:^|.*?\.)(?:{self.text})\.(?P<idx>\d+)\.")

    @cached_property
    def _tail(self) -> str:
        """What every match ends in: spares most names the rest."""
        if "|" in self.text or "(?" in self.text:
            return ""
        found = _TAIL.search(self.text)
        return found.group() if found else ""

    def _match(self, compiled: regex.Pattern[str], name: str) -> regex.Match[str] | None:
        try:
            # `concurrent` lets other threads, such as the engine's, go on meanwhile.
            return compiled.match(name, timeout=_TIMEOUT_S, concurrent=True)
        except TimeoutError:
            raise InvalidAdapter(
                f"{self.key}: the pattern {self.text[:100]!r} takes too long to match",
                param=self.key,
            ) from None


def compile_pattern(key: str, text: str) -> Pattern:
    """Check a pattern. Raises `InvalidAdapter`."""
    try:
        if len(text) > _MAX_LENGTH:
            raise regex.error(f"it is longer than {_MAX_LENGTH} characters")
        regex.compile(text)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise InvalidAdapter(
            f"{key}: {text[:100]!r} is no pattern: {str(error)[:100]}", param=key
        ) from None
    return Pattern(key, text)
