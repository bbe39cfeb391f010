"""The bytes of each token: decoding as a join of byte strings.

`tokenizers` decodes whole lists, and some of its decoders rewrite earlier text when a token is
added. Here each token has fixed bytes inside running text, so that decoding, incremental
detokenization and logprobs agree by construction, and each costs one look-up per token. Text
equals that of `tokenizers` wherever the bytes form characters; where they do not, each maximal
invalid part becomes one U+FFFD (`tokenizers`' byte fallback blanks the whole run instead).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.platform.errors import ModelUnsupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from plait.adapters.info import AddedToken

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_level_alphabet() -> dict[int, int]:
    """Code point → byte of GPT-2's printable alphabet, for `str.translate`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()
_BYTE_LEVEL_CHARS = frozenset(map(chr, _BYTE_LEVEL))


class TokenBytes:
    """Token id → bytes, made on demand. Raises `ModelUnsupported` for an unknown decoder."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._pieces: list[bytes | None] = [None] * self.vocab_size
        self._extra: dict[int, bytes] = {}  # go before those of the backend
        self._read_decoder(backend.decoder)

    def extended(self, tokens: Iterable[AddedToken]) -> TokenBytes:
        """With further tokens, or others in the place of some. Shares what it can with this one."""
        tokens = tuple(tokens)
        other = copy.copy(self)
        ids = {token.token_id for token in tokens}
        other._extra = self._extra | {t.token_id: self._bytes_of(self._content(t)) for t in tokens}
        other._added_ids = self._added_ids | ids
        other.special_ids = (self.special_ids - ids) | {t.token_id for t in tokens if t.special}
        other.vocab_size = max([self.vocab_size, *(token_id + 1 for token_id in ids)])
        return other

    def _content(self, token: AddedToken) -> str:
        """How `tokenizers` shows it: one that is sought in normalized text, normalized itself."""
        normalizer = self._backend.normalizer
        if not token.normalized or normalizer is None:
            return token.text
        normalized: str = normalizer.normalize_str(token.text)
        return normalized

    def _read_decoder(self, decoder: Any) -> None:
        """What each part of the decoder does to a token, and to the beginning of a text."""
        self._byte_level = self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        self._strip = b""  # one such byte is dropped at the very beginning of a text
        self._joined_by_spaces = decoder is None
        if decoder is None:
            self._strip = b" "
            return
        spec = json.loads(decoder.__getstate__())
        for part in spec["decoders"] if spec["type"] == "Sequence" else [spec]:
            self._read_part(part)

    def _read_part(self, part: dict[str, Any]) -> None:
        match part["type"]:
            case "ByteLevel":
                self._byte_level = True
            case "ByteFallback":
                self._byte_fallback = True
            case "Fuse":
                pass
            case "Replace" if "String" in part["pattern"]:
                self._replace.append((part["pattern"]["String"], part["content"]))
            case "Strip" if (part["content"], part["start"], part["stop"]) == (" ", 1, 0):
                self._strip = b" "
            case "Metaspace":
                self._replace.append((part["replacement"], " "))
                self._strip = b"" if part.get("prepend_scheme") == "never" else b" "
            case kind:
                raise ModelUnsupported(
                    f"the tokenizer's decoder {kind} cannot be streamed by Plait; "
                    "byte-level, SentencePiece (with byte fallback) and Metaspace decoders can"
                )

    def piece(self, token_id: int) -> bytes:
        """The token's bytes inside running text; none for an id outside the vocabulary."""
        extra = self._extra.get(token_id)
        if extra is not None:
            return extra
        if not 0 <= token_id < len(self._pieces):
            return b""
        piece = self._pieces[token_id]
        if piece is None:
            piece = self._pieces[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._bytes_of(token)

    def _bytes_of(self, token: str) -> bytes:
        if self._joined_by_spaces:
            return b" " + token.encode()
        for old, new in self._replace:
            token = token.replace(old, new)
        if self._byte_fallback and (byte := _BYTE_TOKEN.match(token)):
            return bytes([int(byte[1], 16)])
        if self._byte_level and _BYTE_LEVEL_CHARS.issuperset(token):
            return token.translate(_BYTE_LEVEL).encode("latin-1")
        return token.encode("utf-8")

    def stream(
        self,
        *,
        at_start: bool,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> PieceStream:
        """What each of the next ids adds to a text; `at_start`: nothing shown stands before."""
        close = self._joined_by_spaces and not spaces_between_special_tokens
        return PieceStream(
            table=self,
            strip=self._strip,
            at_start=at_start,
            skipped_ids=self.special_ids if skip_special_tokens else frozenset(),
            close_ids=self._added_ids if close else frozenset(),
        )


@dataclass(slots=True, kw_only=True)
class PieceStream:
    """Bytes of consecutive tokens of one text."""

    table: TokenBytes
    strip: bytes  # dropped once from the front of the first token shown
    at_start: bool
    skipped_ids: frozenset[int]
    close_ids: frozenset[int]  # those of which two in a row have no space between them
    after_close: bool = False

    def next(self, token_id: int) -> bytes:
        """The bytes that `token_id` adds to the text; none for a skipped one."""
        if token_id in self.skipped_ids:
            return b""
        piece = self.table.piece(token_id)
        close = token_id in self.close_ids
        if (self.at_start and piece) or (close and self.after_close):
            piece = piece.removeprefix(self.strip)
            self.at_start = False
        self.after_close = close
        return piece
