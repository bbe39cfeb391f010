"""Tiny tokenizers of each kind we decode: byte-level, SentencePiece-like, words and spaces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers import (
    Tokenizer as Backend,
)

from plait.platform.text.tokenizer import Tokenizer
from plait.platform.text.tokenizer_files import TokenizerFiles

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_end|>")
WORDS = ("hello", "world", "stop", "my", "cat", "é", "日本", "👍")


def byte_level_backend() -> Backend:
    """All 256 bytes as tokens, a few merged words, added tokens (one not special, not ASCII)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WORDS:
        _add_word(split.pre_tokenize_str(word)[0][0], "Ġ", vocab, merges)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("é｜", normalized=False)]
    )
    return backend


def _add_word(word: str, space: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Make `word` one token, grown from its front, and one more with a space before it."""
    pairs = [(word[: end - 1], word[end - 1]) for end in range(2, len(word) + 1)]
    for left, right in (*pairs, (space, word)):
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))


def sentence_piece_backend() -> Backend:
    """Byte fallback, U+2581 for spaces, one dropped at the front: Llama 2's way."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    merges: list[tuple[str, str]] = []
    words = [word for word in WORDS if word != "👍"]  # that one falls back to bytes
    for char in sorted({"▁", *"".join(words)}):
        vocab[char] = len(vocab)
    for word in words:
        _add_word(word, "▁", vocab, merges)
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return backend


def words_backend() -> Backend:
    """Whole words, no decoder: tokens are joined by spaces."""
    backend = Backend(
        models.WordLevel({word: i for i, word in enumerate(("<unk>", *WORDS))}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level_backend,
    "sentence_piece": sentence_piece_backend,
    "words": words_backend,
}


@cache
def backend(kind: str) -> Backend:
    return BACKENDS[kind]()


@cache
def tokenizer(kind: str) -> Tokenizer:
    return wrap(backend(kind))


def wrap(made: Backend) -> Tokenizer:
    """Our tokenizer around a `tokenizers` object, without files."""
    return Tokenizer(
        TokenizerFiles(
            backend=made,
            bos_token_id=made.token_to_id("<s>"),
            eos_token_ids=(made.token_to_id("</s>"),),
        )
    )
