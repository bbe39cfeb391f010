"""Regular expressions from configs: PEFT's matching of names, in bounded time.

A pattern comes from a file that nobody has checked, and one of a few characters can keep Python's
`re` busy for years; the `regex` module matches the same language with a time limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import regex

from plait.platform.errors import InvalidAdapter

_MAX_LENGTH = 8192
_TIMEOUT_S = 0.25  # real patterns take microseconds


@dataclass(frozen=True, slots=True)
class Pattern:
    """A checked pattern and the key of the config that it stands under."""

    key: str
    text: str

    def match_whole(self, name: str) -> bool:
        """Whether it is the pattern of the whole name."""
        return self._match(rf"(?:{self.text})\Z", name) is not None

    def match_suffix(self, name: str) -> bool:
        """Whether it is the pattern of the name, or of what follows one of its dots."""
        return self._match(rf"(.*\.)?({self.text})$", name) is not None

    def layer(self, name: str) -> int | None:
        """The number that follows the first match and a dot, as layers have it in names."""
        found = self._match(rf"(?:^|.*?\.)(?:{self.text})\.(?P<idx>\d+)\.", name)
        return None if found is None else int(found.group("idx"))

    def _match(self, text: str, name: str) -> regex.Match[str] | None:
        try:
            # `concurrent` lets other threads, such as the engine's, go on meanwhile.
            return regex.match(text, name, timeout=_TIMEOUT_S, concurrent=True)
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
