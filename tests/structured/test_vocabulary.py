"""The vocabulary as grammars see it, of real tokenizers and of small ones."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.fake_engine import BOS, EOS, IM_START, make_tokenizer
from support.grammars import END, OTHER_END, SIZE, SPECIAL, WIDTH, bits, vocabulary

from plait.structured.vocabulary import Vocabulary


def test_of_a_tokenizer_it_has_the_bytes_the_special_tokens_and_the_padding():
    tokenizer = make_tokenizer()
    made = Vocabulary.from_tokenizer(tokenizer, width=300, end_ids=[EOS], hidden_ids=[7])
    assert made.pieces == tuple(tokenizer.token_bytes(t) for t in range(tokenizer.vocab_size))
    assert {BOS, EOS, IM_START, 7} <= made.special_ids
    assert made.end_ids == (EOS,)
    assert (made.width, made.num_words) == (300, 10)
    assert made.encode is not None
    assert b"".join(made.pieces[t] for t in made.encode(" é{")) == " é{".encode()
    narrow = Vocabulary.from_tokenizer(tokenizer, width=100, end_ids=[5, EOS])
    assert (len(narrow.pieces), narrow.end_ids) == (100, (5,))


def test_special_tokens_get_bytes_that_are_in_no_text():
    hidden = vocabulary().hidden_pieces()
    for token in (END, OTHER_END, SPECIAL):
        with pytest.raises(UnicodeDecodeError):
            hidden[token].decode()
        assert hidden[token].startswith(b"\xff\xfe")
    assert len({hidden[t] for t in vocabulary().special_ids}) == 3
    assert hidden[97] == b"a"


def test_a_file_gives_back_an_equal_vocabulary(tmp_path):
    vocabulary().write(tmp_path / "vocabulary")
    read = Vocabulary.read(tmp_path / "vocabulary")
    assert read.digest == vocabulary().digest
    assert (read.pieces, read.special_ids) == (vocabulary().pieces, vocabulary().special_ids)
    (tmp_path / "vocabulary").write_bytes(b"\x95\x02")
    with pytest.raises(msgspec.DecodeError):
        Vocabulary.read(tmp_path / "vocabulary")


@pytest.mark.parametrize(
    "change",
    [{"width": WIDTH + 1}, {"end_ids": (END,)}, {"special_ids": frozenset({END, OTHER_END})}],
)
def test_every_part_is_in_the_digest(change):
    import dataclasses

    assert dataclasses.replace(vocabulary(), **change).digest != vocabulary().digest


def test_an_adapter_adds_tokens_and_replaces_none():
    wide = vocabulary().extended({SIZE: b"new", WIDTH + 64: b"far"}, special_ids=[SIZE])
    assert (wide.width, wide.num_words) == (WIDTH + 65, -(-(WIDTH + 65) // 32))
    assert wide.pieces[SIZE] == b"new"
    assert wide.pieces[SIZE + 1] == b""
    assert SIZE in wide.special_ids
    assert vocabulary().extended({SIZE: b"new"}).width == WIDTH
    for wrong in ({97: b"b"}, {-1: b"x"}):
        with pytest.raises(ValueError, match="already"):
            vocabulary().extended(wrong)


def test_rows_of_bits_hold_what_they_are_made_of():
    assert bits(vocabulary().end_mask) == {END, OTHER_END}
    ids = {0, 31, 32, 63, WIDTH - 1}
    row = vocabulary().mask_of(ids)
    assert (row.dtype, row.shape) == (np.int32, (vocabulary().num_words,))
    assert bits(row) == ids
