"""Incremental text: deltas join to the full decode, and stop strings cut exactly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_tokenizers

from plait.platform.core import SamplingParams
from plait.platform.text.output import OutputText

KINDS = tuple(tiny_tokenizers.BACKENDS)


def token_ids(kind: str) -> st.SearchStrategy[list[int]]:
    size = tiny_tokenizers.tokenizer(kind).vocab_size
    return st.lists(st.integers(0, size - 1), max_size=40)


def kinds_with_ids() -> st.SearchStrategy[tuple[str, list[int]]]:
    return st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), token_ids(kind)))


def stream(kind: str, ids: list[int], prompt: list[int] | None = None, **params: Any) -> Streamed:
    return Streamed(kind, ids, prompt or [], SamplingParams(**params))


class Streamed:
    """Deltas after each token, the one at the end, and the stop string with its token's number."""

    def __init__(
        self, kind: str, ids: list[int], prompt: list[int], params: SamplingParams
    ) -> None:
        text = OutputText(tiny_tokenizers.tokenizer(kind), params, prompt)
        self.deltas: list[str] = []
        self.stop: str | None = None
        self.num_tokens = 0
        for token_id in ids:
            self.num_tokens += 1
            self.stop = text.append(token_id)
            if self.stop is not None:
                break
            self.deltas.append(text.take())
        self.last = text.take(final=True)
        assert text.take(final=True) == ""
        self.text = "".join(self.deltas) + self.last


@given(kinds_with_ids(), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_deltas_join_to_the_decode_of_all_ids(
    case: tuple[str, list[int]], skip: bool, spaces: bool
) -> None:
    kind, ids = case
    options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
    out = stream(kind, ids, **options)
    assert out.text == tiny_tokenizers.tokenizer(kind).decode(ids, **options)


@given(st.text(max_size=30), st.sampled_from(("byte_level", "sentence_piece")))
@settings(max_examples=300, deadline=None)
def test_no_delta_splits_a_character(text: str, kind: str) -> None:
    ids = tiny_tokenizers.tokenizer(kind).encode(text, add_special_tokens=False)
    out = stream(kind, ids, skip_special_tokens=False)
    assert out.text == text
    assert out.last == ""  # nothing was left over
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(out.deltas)


def test_an_emoji_of_four_tokens_comes_whole_with_the_last() -> None:
    ids = tiny_tokenizers.tokenizer("sentence_piece").encode("👍", add_special_tokens=False)
    out = stream("sentence_piece", ids[-4:])
    assert out.deltas == ["", "", "", "👍"]


def test_an_unfinished_character_shows_as_replacement_only_at_the_end() -> None:
    tokenizer = tiny_tokenizers.tokenizer("byte_level")
    ids = [i for byte in "👍".encode()[:3] for i in byte_token(byte)]
    out = stream("byte_level", ids)
    assert out.deltas == ["", "", ""]
    assert out.last == "\ufffd" == tokenizer.decode(ids)


def byte_token(byte: int) -> list[int]:
    tokenizer = tiny_tokenizers.tokenizer("byte_level")
    return [i for i in range(256) if tokenizer.token_bytes(i) == bytes([byte])]


@pytest.mark.parametrize(
    ("prompt", "text"), [([], "cat"), (["<s>"], "cat"), (["my"], " cat"), (["<s>", "my"], " cat")]
)
def test_the_space_between_prompt_and_output_is_kept(prompt: list[str], text: str) -> None:
    backend = tiny_tokenizers.backend("sentence_piece")
    out = stream(
        "sentence_piece", [backend.token_to_id("▁cat")], [backend.token_to_id(t) for t in prompt]
    )
    assert out.text == text


def expected_cut(pieces: list[str], stops: list[str], min_tokens: int, include: bool) -> Any:
    """Oracle: look at the whole text after each character."""
    text = ""
    for number, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            ended = [stop for stop in stops if text.endswith(stop)]
            if ended and number > min_tokens:
                stop = max(ended, key=len)
                return (text if include else text[: len(text) - len(stop)]), stop, number
    return text, None, len(pieces)


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "c"]), max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
@settings(max_examples=800, deadline=None)
def test_stop_strings_cut_where_they_end_first(
    pieces: list[str], stops: list[str], min_tokens: int, include: bool
) -> None:
    tokenizer = letters()
    ids = [tokenizer.encode(piece)[0] for piece in pieces]
    params = SamplingParams(
        stop=stops, min_tokens=min_tokens, max_tokens=99, include_stop_str_in_output=include
    )
    text = OutputText(tokenizer, params, [])
    shown, stopped, number = "", None, 0
    for token_id in ids:
        number += 1
        stopped = text.append(token_id)
        if stopped is not None:
            break
        shown += text.take()
    whole = shown + text.take(final=True)
    assert (whole, stopped, number) == expected_cut(pieces, stops, min_tokens, include)


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "c"]), max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_only_possible_beginnings_of_stop_strings_stay_back(
    pieces: list[str], stops: list[str]
) -> None:
    tokenizer = letters()
    text = OutputText(tokenizer, SamplingParams(stop=stops), [])
    shown = so_far = ""
    for piece in pieces:
        so_far += piece
        if text.append(tokenizer.encode(piece)[0]) is not None:
            return
        shown += text.take()
        held = so_far[len(shown) :]
        assert so_far.startswith(shown)
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        longest = max((b for b in beginnings if so_far.endswith(b)), key=len)
        assert held == longest


def letters() -> Any:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    made = Backend(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "ba": 4},
                              merges=[("a", "b"), ("b", "a")]))  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return tiny_tokenizers.wrap(made)


def test_tokens_after_the_stop_add_nothing() -> None:
    tokenizer = letters()
    text = OutputText(tokenizer, SamplingParams(stop="b"), [])
    assert [text.append(i) for i in (0, 1, 2)] == [None, "b", None]
    assert text.take(final=True) == "a"
