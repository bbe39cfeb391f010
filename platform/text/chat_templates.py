"""The chat templates of a tokenizer, compiled when they are first used.

Jinja and a template take 70 ms, and whoever never renders a chat needs neither: the engine's
process, or the completion of a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.platform.text.chat_template import ChatTemplate


class ChatTemplates(Mapping[str, "ChatTemplate"]):
    """Templates by name; `sources` are their texts, `special_tokens` those of `ChatTemplate`."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self.special_tokens = dict(special_tokens)
        self._sources = dict(sources)
        self._compiled: dict[str, ChatTemplate] = {}

    def __getitem__(self, name: str) -> ChatTemplate:
        """Raises `ConfigError` where it does not compile."""
        found = self._compiled.get(name)
        if found is None:
            from plait.platform.text.chat_template import ChatTemplate

            # Two threads at once make equal ones.
            found = self._compiled[name] = ChatTemplate(self._sources[name], self.special_tokens)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
