"""The vocabulary as grammars see it: the bytes of each token, and which tokens are no text.

Built once per served model and handed to matchers and, as a file, to compile workers. A special
token never counts as text: each backend gets it in a form that no string, pattern or grammar can
produce, while token-level rules still name it by its id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from plait.platform.config import ModelInfo
    from plait.platform.text.tokenizer import Tokenizer

Mask = npt.NDArray[np.int32]
Encode = Callable[[str], list[int]]

_FORMAT = 1


class _File(msgspec.Struct, frozen=True, array_like=True):
    """What the digest is taken over, and what a worker reads."""

    format: int
    pieces: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    width: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """Bytes of every token id. Immutable; equal digests are equal vocabularies.

    Ids from `len(pieces)` up to `width` are padding, which no mask ever allows.
    """

    pieces: tuple[bytes, ...]  # by id; empty where a token adds nothing
    special_ids: frozenset[int]  # never text; includes the end tokens
    end_ids: tuple[int, ...]  # any of these ends a sequence
    width: int  # of the logits
    encode: Encode | None = field(default=None, repr=False)  # text → ids; not in the digest
    # What `extended` added, so that others can do the same: (id, bytes, whether it is special).
    added: tuple[tuple[int, bytes, bool], ...] = field(default=(), repr=False)  # nor this

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        width: int,
        end_ids: Iterable[int],
        hidden_ids: Iterable[int] = (),
    ) -> Vocabulary:
        """The vocabulary of a served model, whose logits are `width` wide.

        `hidden_ids` are further tokens that must not occur as text. Tokens beyond the logits are
        left out: the model cannot choose them.
        """
        size = min(tokenizer.vocab_size, width)
        ends = tuple(sorted({t for t in end_ids if t < width}))
        special = {*tokenizer.bytes_table.special_ids, *hidden_ids, *ends}
        return cls(
            pieces=tuple(tokenizer.token_bytes(t) for t in range(size)),
            special_ids=frozenset(t for t in special if t < size),
            end_ids=ends,
            width=width,
            encode=_encoder(tokenizer),
        )

    def extended(
        self, extra: Mapping[int, bytes], *, special_ids: Iterable[int] = ()
    ) -> Vocabulary:
        """With the tokens that an adapter adds; they may lie in the padding or widen the rows.

        Raises ValueError where one would replace a token that there is.
        """
        size = max([len(self.pieces), *(t + 1 for t in extra)])
        pieces = [*self.pieces, *[b""] * (size - len(self.pieces))]
        for token, piece in extra.items():
            if token < 0 or (pieces[token] and pieces[token] != piece):
                raise ValueError(f"token {token} is in the vocabulary already")
            pieces[token] = piece
        special = frozenset(special_ids)
        return replace(
            self,
            added=(*self.added, *((t, piece, t in special) for t, piece in extra.items())),
            pieces=tuple(pieces),
            special_ids=self.special_ids | special,
            width=max(self.width, size),
            encode=None,  # the base model's tokenizer does not know the new tokens
        )

    @classmethod
    def of_model(cls, tokenizer: Tokenizer, model: ModelInfo) -> Vocabulary:
        """That of a served model. Whoever makes it gets the same digest."""
        return cls.from_tokenizer(tokenizer, width=model.vocab_size, end_ids=model.eos_token_ids)

    def with_added(self, added: Iterable[tuple[int, bytes, bool]]) -> Vocabulary:
        """As `extended`, with what another vocabulary's `added` lists."""
        added = tuple(added)
        if not added:
            return self
        special = [token for token, _, is_special in added if is_special]
        return self.extended({t: piece for t, piece, _ in added}, special_ids=special)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over all that a compiled grammar depends on."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask row."""
        return -(-self.width // 32)

    @cached_property
    def end_mask(self) -> Mask:
        """A row in which only the end tokens are allowed. Not to be written to."""
        return self.mask_of(self.end_ids)

    def mask_of(self, ids: Iterable[int]) -> Mask:
        """A row in which only `ids` are allowed."""
        bits = np.zeros(self.num_words * 32, np.uint8)
        bits[list(ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def hidden_pieces(self) -> list[bytes]:
        """The pieces with each special token's bytes replaced by some that are never UTF-8.

        FF and FE occur in no character, so no string, pattern or grammar produces them.
        """
        return [
            b"\xff\xfe%d" % token if token in self.special_ids else piece
            for token, piece in enumerate(self.pieces)
        ]

    # --- as a file for workers ---

    def to_bytes(self) -> bytes:
        """All but `encode`; equal vocabularies give equal bytes."""
        content = _File(
            _FORMAT, self.pieces, tuple(sorted(self.special_ids)), self.end_ids, self.width
        )
        return msgspec.msgpack.encode(content)

    @classmethod
    def from_bytes(cls, content: bytes) -> Vocabulary:
        """The reverse of `to_bytes`. Raises `msgspec.DecodeError` for anything else."""
        read = msgspec.msgpack.decode(content, type=_File)
        if read.format != _FORMAT:
            raise msgspec.DecodeError(f"a vocabulary of format {read.format}")
        return cls(
            pieces=read.pieces,
            special_ids=frozenset(read.special_ids),
            end_ids=read.end_ids,
            width=read.width,
        )

    def write(self, path: Path) -> None:
        """Write `to_bytes` to a file."""
        path.write_bytes(self.to_bytes())

    @classmethod
    def read(cls, path: Path) -> Vocabulary:
        """Read what `write` wrote."""
        return cls.from_bytes(path.read_bytes())


def _encoder(tokenizer: Tokenizer) -> Encode:
    """Tokens of a text as it reads in the middle of another, where no tokenizer adds a space."""
    head = tokenizer.encode("\n", add_special_tokens=False)

    def encode(text: str) -> list[int]:
        whole = tokenizer.encode("\n" + text, add_special_tokens=False)
        if head and whole[: len(head)] == head:
            return whole[len(head) :]
        return tokenizer.encode(text, add_special_tokens=False)

    return encode
