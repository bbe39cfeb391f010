"""Tokens of an adapter in the model's tokenizer: `tokenizers` itself says what they mean."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import tiny_tokenizers
from tokenizers import AddedToken as TheirToken
from tokenizers import Tokenizer as Backend

from plait.adapters.info import AddedToken
from plait.platform.core import SamplingParams
from plait.platform.errors import InvalidAdapter
from plait.platform.text.output import OutputText

FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
KINDS = list(tiny_tokenizers.BACKENDS)
SHAPES = [
    {"text": "<foo>", "special": True},
    {"text": "bar baz", "normalized": True},
    {"text": "<left>", "lstrip": True},
    {"text": "<right>", "rstrip": True, "special": True},
    {"text": "lone", "single_word": True, "normalized": True},
    {"text": "日本語", "normalized": False},
]


def ours(kind: str) -> tuple[AddedToken, ...]:
    first = tiny_tokenizers.tokenizer(kind).vocab_size
    return tuple(AddedToken(token_id=first + i, **shape) for i, shape in enumerate(SHAPES))


def theirs(kind: str, tokens: tuple[AddedToken, ...]) -> Backend:
    backend = Backend.from_str(tiny_tokenizers.backend(kind).to_str())
    for t in tokens:
        backend.add_tokens([TheirToken(t.text, **{flag: getattr(t, flag) for flag in FLAGS})])
    return backend


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_ids_are_those_of_a_tokenizer_with_these_tokens(kind: str) -> None:
    base, tokens = tiny_tokenizers.tokenizer(kind), ours(kind)
    extended, oracle = base.extended(tokens), theirs(kind, tokens)
    rng = random.Random(kind)
    pieces = [*(t.text for t in tokens), "hello", " world", "cat", " ", "alone", "</s>", "é"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 8)))
        for special in (True, False):
            ids = oracle.encode(text, add_special_tokens=special).ids
            assert extended.encode(text, add_special_tokens=special) == ids
        if kind == "words":
            continue  # their joining with spaces is shown elsewhere
        for skip in (True, False):
            wanted = oracle.decode(ids, skip_special_tokens=skip)
            assert extended.decode(ids, skip_special_tokens=skip) == wanted
    assert extended.vocab_size == base.vocab_size + len(tokens)
    assert extended.token_text(tokens[2].token_id).strip() == "<left>"


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_stays_as_it_was(kind: str) -> None:
    base = tiny_tokenizers.tokenizer(kind)
    before = base.encode("hello <foo> bar baz")
    base.extended(ours(kind)).encode("<foo>")
    assert base.encode("hello <foo> bar baz") == before
    assert base.token_bytes(ours(kind)[0].token_id) == b""
    assert base.extended(()) is base
    known = AddedToken(token_id=base.encode("</s>", add_special_tokens=False)[0], text="</s>")
    assert base.extended([known]) is base


def test_reserved_tokens_may_get_other_names() -> None:
    base = tiny_tokenizers.tokenizer("byte_level")
    (think,) = base.encode("<think>")
    renamed = base.extended([AddedToken(token_id=think, text="<plan>", special=True)])
    assert renamed.encode("a<plan>") == [*base.encode("a"), think]
    assert renamed.encode("<think>") == base.encode("<") + base.encode("think>")
    assert renamed.decode([think]) == ""
    assert renamed.decode([think], skip_special_tokens=False) == "<plan>"
    assert base.decode([think]) == "<think>"


def test_a_word_of_the_vocabulary_may_become_an_added_token() -> None:
    base = tiny_tokenizers.tokenizer("byte_level")
    (hello,) = base.encode("hello")
    made = base.extended([AddedToken(token_id=hello, text="hello", special=True)])
    assert made.encode("xhellox") == [*base.encode("x"), hello, *base.encode("x")]
    assert (base.decode([hello]), made.decode([hello])) == ("hello", "")


@pytest.mark.parametrize(
    "token", [{"token_id": 65, "text": "<x>"}, {"token_id": 999, "text": "<x>"},
              {"token_id": 292, "text": "hello"}],
)  # fmt: skip
def test_tokens_of_another_model_are_refused(token: dict) -> None:
    made = tiny_tokenizers.tokenizer("byte_level").extended([AddedToken(**token)])
    with pytest.raises(InvalidAdapter, match=r"the adapter's tokenizer gives"):
        made.check()


def test_tokens_without_rows_are_left_out() -> None:
    base, tokens = tiny_tokenizers.tokenizer("byte_level"), ours("byte_level")
    made = base.extended(tokens, end_token="<foo>")
    assert made.eos_token_ids == (*base.eos_token_ids, tokens[0].token_id)
    fewer = made.within(tokens[2].token_id)
    assert fewer.added_tokens == tokens[:2]
    assert fewer.encode("<left>") == base.encode("<left>")
    assert fewer.token_bytes(tokens[2].token_id) == b""
    assert made.within(tokens[0].token_id).eos_token_ids == base.eos_token_ids


def test_output_text_stops_at_the_text_of_an_added_token() -> None:
    made = tiny_tokenizers.tokenizer("byte_level").extended(ours("byte_level"))
    ids = made.encode("hello<foo>lone world")

    def shown(**fields) -> tuple[str, list[str | None]]:
        text = OutputText(made, SamplingParams(**fields), [])
        stops = [text.append(i) for i in ids]
        return text.take(final=True), stops

    assert shown()[0] == "hellolone world"
    assert shown(skip_special_tokens=False)[0] == "hello<foo>lone world"
    stopped, stops = shown(skip_special_tokens=False, stop=("o<f",))
    assert (stopped, "o<f" in stops) == ("hell", True)


def test_many_threads_may_use_more_adapters_than_are_kept() -> None:
    base = tiny_tokenizers.tokenizer("byte_level")
    first = base.vocab_size
    many = [base.extended([AddedToken(token_id=first, text=f"<{i}>")]) for i in range(20)]

    def work(turn: int) -> bool:
        i = turn * 7 % 20
        return many[i].encode(f"<{i}>") == [first] and len(many[i].encode(f"<{i + 1}>")) > 1

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(120)))
