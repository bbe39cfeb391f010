"""Regular expressions from configs: PEFT's matching of names, in bounded time.

A pattern comes from a file that nobody has checked, and one of a few characters can keep Python's
`re` busy for years; the `regex` module matches the same language with a time limit. Most patterns
are names, though, and need neither.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cached_property

import regex

from plait.platform.errors import InvalidAdapter

_MAX_LENGTH = 8192
_TIMEOUT_S = 0.25  # real patterns take microseconds
_TAIL = re.compile(r"(?<![\\\w])\w+\Z")
_NAME = re.compile(r"[\w.]+\Z")
# `regex` reads such braces as "about so", and `re` as themselves, which no name has.
_STRANGE_BRACE = re.compile(r"(?<!\\)\{(?!\d+(,\d*)?\}|,\d+\})")


@dataclass(frozen=True)
class Pattern:
    """A checked pattern and the key of the config that it stands under."""

    key: str
    text: str

    @cached_property
    def is_name(self) -> bool:
        """Whether nothing in it has a meaning but dots, which stand for any character."""
        return _NAME.match(self.text) is not None

    def match_whole(self, name: str) -> bool:
        """Whether it is the pattern of the whole name."""
        return self._match(self._whole, name) is not None

    def match_suffix(self, name: str) -> bool:
        """Whether it is the pattern of the name, or of what follows one of its dots."""
        if not name.endswith(self._tail):
            return False
        return self._ends(name) if self.is_name else self._match(self._suffix, name) is not None

    def layer(self, name: str) -> int | None:
        """The number that follows the first match and a dot, as layers have it in names."""
        found = self._match(self._layer, name)
        return None if found is None else int(found.group("idx"))

    def compile(self) -> None:
        """Raise `regex.error` for what is no pattern where it stands within another."""
        _ = self._whole, self._suffix, self._layer

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

    def _ends(self, name: str) -> bool:
        """`match_suffix` of a pattern that is a name."""
        start = len(name) - len(self.text)
        if start < 0 or (start and name[start - 1] != "."):
            return False
        return all(p in (".", c) for p, c in zip(self.text, name[start:], strict=True))

    @cached_property
    def _spent_s(self) -> list[float]:
        """Seconds of processor time that matching has taken, over all names."""
        return [0.0]

    def _match(self, compiled: regex.Pattern[str], name: str) -> regex.Match[str] | None:
        began_s = time.thread_time()
        try:
            # `concurrent` lets other threads, such as the engine's, go on meanwhile.
            found = compiled.match(name, timeout=_TIMEOUT_S, concurrent=True)
        except TimeoutError:
            found, self._spent_s[0] = None, _TIMEOUT_S
        self._spent_s[0] += time.thread_time() - began_s
        if self._spent_s[0] >= _TIMEOUT_S:
            raise InvalidAdapter(
                f"{self.key}: the pattern {self.text[:100]!r} takes too long to match",
                param=self.key,
            )
        return found


def compile_pattern(key: str, text: str) -> Pattern:
    """Check a pattern. Raises `InvalidAdapter`."""
    pattern = Pattern(key, text)
    try:
        if len(text) > _MAX_LENGTH:
            raise regex.error(f"it is longer than {_MAX_LENGTH} characters")
        if _STRANGE_BRACE.search(text):
            raise regex.error("a brace in it repeats nothing")
        if not pattern.is_name:
            re.compile(text)  # what PEFT cannot read means nothing
            pattern.compile()
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        raise InvalidAdapter(
            f"{key}: {text[:100]!r} is no pattern: {str(error)[:100]}", param=key
        ) from None
    return pattern
