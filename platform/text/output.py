"""The text of one sequence, token by token: whole characters, stop strings cut exactly."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from plait.platform.core import SamplingParams

if TYPE_CHECKING:
    from plait.platform.text.tokenizer import Tokenizer

_NewDecoder = codecs.getincrementaldecoder("utf-8")


class OutputText:
    """Incremental text of one sequence.

    The deltas of `take` concatenate to `tokenizer.decode(output ids)` (with the space in front
    where the prompt's text goes on), cut at the first stop string. Each token costs one look-up
    and a comparison with the stop strings' beginnings.

    A stop string may lie across token borders. The match that ends earliest counts; of several
    that end at the same character the longest. The first `min_tokens` tokens end no match
    (vLLM's rule); a match may begin in them.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        table = tokenizer.bytes_table
        hidden = table.special_ids if params.skip_special_tokens else frozenset()
        shown = (t for t in reversed(prompt_token_ids) if t not in hidden and table.piece(t))
        self._pieces = table.stream(
            at_start=next(shown, None) is None,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._decoder = _NewDecoder("replace")
        self._stops = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._longest_stop = max(map(len, self._stops), default=0)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._ready: list[str] = []  # may be shown
        self._held = ""  # could be the beginning of a stop string
        self._ended = False

    def append(self, token_id: int) -> str | None:
        """Add a token; returns the stop string that now ends the text, if any."""
        self._num_tokens += 1
        if self._ended:
            return None
        new = self._decoder.decode(self._pieces.next(token_id))
        if not new:
            return None
        if not self._stops:
            self._ready.append(new)
            return None
        return self._scan(new)

    def take(self, *, final: bool = False) -> str:
        """The text to show now, each character once.

        Unless `final`, text that may yet become a stop string stays back, as do the bytes of an
        unfinished character; `final` ends the text.
        """
        if final and not self._ended:
            rest = self._decoder.decode(b"", final=True)
            self._ready.append(self._held[self._num_shown_held() :] + rest)
            self._ended = True
        delta = "".join(self._ready)
        self._ready.clear()
        return delta

    def _num_shown_held(self) -> int:
        """With the stop string included in the output nothing needs to stay back."""
        return len(self._held) if self._include_stop else 0

    def _scan(self, new: str) -> str | None:
        shown = self._num_shown_held()
        first_end = len(self._held) + 1
        text = self._held + new
        if self._num_tokens > self._min_tokens:
            match = self._find_stop(text, first_end)
            if match is not None:
                start, stop = match
                cut = start + len(stop) if self._include_stop else start
                self._ready.append(text[shown:cut])
                self._ended = True
                return stop
        keep = self._possible_stop(text)
        self._ready.append(text[shown:] if self._include_stop else text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return None

    def _find_stop(self, text: str, first_end: int) -> tuple[int, str] | None:
        """The match with the earliest end not before `first_end`; of equal ones the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, first_end - len(stop)))
            if start >= 0:
                found = (start + len(stop), -len(stop), stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[0] - len(best[2]), best[2])

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        for length in range(min(len(text), self._longest_stop - 1), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0
