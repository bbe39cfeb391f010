"""Log-probabilities in the forms that clients know: chat, legacy completions, prompt.

Legacy text offsets count characters of the choice's text (echo included): a token that begins
inside a character has the offset of that character; a special token that is not shown adds none.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.platform.core import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from plait.platform.server.prompts import Prompt
    from plait.platform.text.tokenizer import Tokenizer

_NewDecoder = codecs.getincrementaldecoder("utf-8")
LOWEST = -9999.0  # JSON has no -Infinity; OpenAI's and vLLM's stand-in


class LogprobsFormat:
    """How tokens are named in one request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.params = params
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """The token as text, or `token_id:…` where the client asked for that."""
        return f"token_id:{token_id}" if self._as_ids else self.tokenizer.token_text(token_id)

    def legacy_name(self, token_id: int) -> str:
        r"""Like `name`; a part of a character is OpenAI's `bytes:\xe2\x82`.

        The legacy form keys alternatives by this name, so that parts must differ from each other.
        """
        if not self._as_ids:
            piece = self.tokenizer.token_bytes(token_id)
            try:
                return piece.decode("utf-8")
            except UnicodeDecodeError:
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
        return self.name(token_id)

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat completion or chunk."""
        top = self.params.logprobs or 0
        return {"content": [self._chat_entry(entry, top) for entry in entries], "refusal": None}

    def _chat_entry(self, entry: TokenLogprobs, top: int) -> dict[str, Any]:
        best = [self._chat_token(i, logprob) for i, logprob in entry.top[:top]]
        return self._chat_token(entry.token_id, entry.logprob) | {"top_logprobs": best}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        """The `prompt_logprobs` of vLLM: null for the first token, then id → logprob of each."""
        return [None, *(self._prompt_entry(entry) for entry in entries)]

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = entry.top[: self.params.prompt_logprobs or 0]
        shown = {str(entry.token_id): self._ranked(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(top, start=1):
            shown.setdefault(str(token_id), self._ranked(token_id, logprob, rank))
        return shown

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {
            "logprob": max(logprob, LOWEST),
            "rank": rank,
            "decoded_token": self.name(token_id),
        }


class LegacyLogprobs:
    """`choices[].logprobs` of one text completion, in pieces; keeps the text offset."""

    def __init__(self, form: LogprobsFormat, prompt: Prompt, *, echo: bool) -> None:
        self._form = form
        self._prompt = prompt
        self._offset = 0
        self._decoder = _NewDecoder("replace")
        params, table = form.params, form.tokenizer.bytes_table
        hidden = table.special_ids if params.skip_special_tokens else frozenset()
        shown = (i not in hidden and table.piece(i) for i in reversed(prompt.token_ids))
        self._pieces = table.stream(
            at_start=echo or not any(shown),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    def prompt(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The echoed prompt; its first token has no probability."""
        first = self._piece(self._prompt.token_ids[0], None, [])
        columns = _columns([first, *(self._entry(entry) for entry in entries)])
        self._offset = len(self._prompt.echo)  # the client's own text, where it gave text
        self._decoder.reset()
        return columns

    def output(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Generated tokens."""
        return _columns([self._entry(entry) for entry in entries])

    def _entry(self, entry: TokenLogprobs) -> tuple[Any, ...]:
        top = entry.top[: self._form.params.logprobs or 0]
        return self._piece(entry.token_id, entry.logprob, [*top, (entry.token_id, entry.logprob)])

    def _piece(
        self, token_id: int, logprob: float | None, top: Sequence[tuple[int, float]]
    ) -> tuple[Any, ...]:
        """A row; `top` best first. Tokens of the same text share the best one's entry."""
        best: dict[str, float] = {}
        for other, value in top:
            best.setdefault(self._form.legacy_name(other), max(value, LOWEST))
        offset = self._offset
        self._offset += len(self._decoder.decode(self._pieces.next(token_id)))
        shown = None if logprob is None else max(logprob, LOWEST)
        return self._form.legacy_name(token_id), shown, best or None, offset


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of one choice's logprobs as one."""
    return {
        key: [item for part in parts for item in part[key]]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }


def _columns(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    names, values, tops, offsets = zip(*rows, strict=True) if rows else ((), (), (), ())
    return {
        "tokens": list(names),
        "token_logprobs": list(values),
        "top_logprobs": list(tops),
        "text_offset": list(offsets),
    }
