"""Forced text as tokens: those that the model itself would write it with.

Any tokens that spell the bytes are legal. Only the usual ones are worth proposing, because each is
verified against the model's own choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.structured.vocabulary import Vocabulary


def forced_tokens(vocabulary: Vocabulary, forced: bytes, *, open_end: bool) -> list[int]:
    """Tokens of the whole characters at the front of `forced`.

    With an `open_end`, more text follows: then a word or number that stands last is left out, as
    it may be part of a longer token.
    """
    text = forced.decode("utf-8", "ignore") if _cut_short(forced) else _decoded(forced)
    if not text or vocabulary.encode is None:
        return []
    tokens: list[int] = []
    spelled = 0
    wanted = text.encode()
    for token in vocabulary.encode(text):
        piece = vocabulary.pieces[token] if token < len(vocabulary.pieces) else b""
        if not piece or token in vocabulary.special_ids or not wanted.startswith(piece, spelled):
            break
        tokens.append(token)
        spelled += len(piece)
    if open_end:
        while tokens and chr(vocabulary.pieces[tokens[-1]][-1]).isalnum():
            tokens.pop()
    return tokens


def _cut_short(forced: bytes) -> bool:
    """Whether `forced` is UTF-8 but for a last character of which bytes are missing."""
    try:
        forced.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _decoded(forced: bytes) -> str:
    """As text; none where it begins in the middle of a character."""
    try:
        return forced.decode()
    except UnicodeDecodeError:
        return ""
