"""What both libraries do, as one matcher shows it: an upgrade that changes it is seen here."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from support.grammars import (
    BACKENDS,
    EMPTY,
    END,
    FIRST_LONGER,
    OTHER_END,
    SIZE,
    SPECIAL,
    WIDTH,
    accepts,
    allowed,
    backend,
    bits,
    choice_matcher,
    compact,
    matcher,
    schema_matcher,
    spaced,
    vocabulary,
)

from plait.platform.errors import (
    InternalError,
    InvalidGrammar,
    InvalidRegex,
    InvalidSchema,
    UnsupportedSchemaKeyword,
)
from plait.structured.matcher import MatcherStore
from plait.structured.spec import CompiledGrammar, GrammarKind

ENDS = {END, OTHER_END}
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
both = pytest.mark.parametrize("name", BACKENDS)


@both
def test_the_end_of_json_leaves_exactly_the_end_tokens(name):
    m = schema_matcher(name, OBJECT)
    assert not m.can_end
    for byte in b'{"a":"x"}':
        assert not m.finished
        assert m.accept(byte)
    assert m.can_end
    assert m.finished
    assert allowed(m) == ENDS
    assert m.accept(OTHER_END)
    assert m.finished
    assert not m.can_end
    assert allowed(m) == ENDS  # no exception, and no row of zeros
    assert not m.accept(END)
    assert not m.accept(ord("x"))
    m.rollback(1)
    assert allowed(m) == ENDS
    assert m.can_end
    m.rollback(2)
    assert ord("y") in allowed(m)
    assert accepts(m, b'y"}')


@both
def test_a_wrong_token_changes_nothing(name):
    m = schema_matcher(name, OBJECT)
    assert accepts(m, b'{"a":"x') is False
    before = allowed(m)
    for wrong in (-1, EMPTY, SPECIAL, END, WIDTH - 1, WIDTH, 10**6, 0x0A, 0xFF):
        assert not m.accept(wrong)
        assert m.num_tokens == 7
        assert allowed(m) == before
    assert accepts(m, b'"}')


@both
def test_only_what_was_accepted_can_be_undone(name):
    m = schema_matcher(name, OBJECT)
    m.accept(ord("{"))
    with pytest.raises(ValueError, match="cannot undo 2 of 1"):
        m.rollback(2)
    m.rollback(1)
    assert accepts(m, b'{"a":""}')


@both
def test_copies_are_independent(name):
    m = schema_matcher(name, OBJECT)
    for byte in b'{"a":"x':
        m.accept(byte)
    other = m.copy()
    assert accepts(other, b'"}')
    assert other.accept(END)
    assert not m.can_end
    assert accepts(m, b'yz"}')
    other.rollback(10)
    assert accepts(other, b'{"a":""}')


@both
@pytest.mark.parametrize(
    ("pattern", "text", "can_end", "finished"),
    [("ab?", "a", True, False), ("ab?", "ab", True, True), ("a+", "aa", True, False)],
)
def test_a_text_that_may_go_on_is_not_finished(name, pattern, text, can_end, finished):
    m = matcher(name, GrammarKind.REGEX, pattern)
    for byte in text.encode():
        m.accept(byte)
    assert (m.can_end, m.finished) == (can_end, finished)


@both
def test_masks_hold_neither_padding_nor_special_nor_empty_tokens(name):
    never = {SPECIAL, EMPTY, *ENDS, *range(SIZE, WIDTH)}
    for kind, content, start in [
        (GrammarKind.JSON_SCHEMA, {"type": "string"}, b'"'),
        (GrammarKind.REGEX, "[^x]*y", b""),
        (GrammarKind.GRAMMAR, GRAMMARS[name], b"<"),
    ]:
        m = matcher(name, kind, content)
        for byte in start:
            assert m.accept(byte)
        found = allowed(m)
        assert not found & never
        assert {ord("a"), FIRST_LONGER + 3, FIRST_LONGER + 9} <= found  # a token there twice, too


GRAMMARS = {"xgrammar": 'root ::= "<" [^>]* ">"', "llguidance": 'start: "<" /[^>]*/ ">"'}


@both
def test_the_name_of_a_special_token_may_be_spelled_but_never_be_the_token(name):
    m = schema_matcher(name, {"type": "string"})
    m.accept(ord('"'))
    for byte in b"<|special|>":
        assert SPECIAL not in allowed(m)
        assert m.accept(byte)
    assert m.accept(ord('"'))


@both
def test_structure_may_name_tokens_by_id_or_name(name):
    if name == "xgrammar":
        tag = {"type": "structural_tag", "format": {"type": "token", "token": SPECIAL}}
        m = matcher(name, GrammarKind.STRUCTURAL_TAG, tag)
    else:
        m = matcher(name, GrammarKind.GRAMMAR, "start: <|special|>")
    assert allowed(m) == {SPECIAL}
    assert m.accept(SPECIAL)
    assert m.finished


@both
def test_strings_hold_no_control_bytes_and_no_broken_characters(name):
    m = schema_matcher(name, {"type": "string"})
    m.accept(ord('"'))
    assert not allowed(m) & {*range(0x20), *range(0x80, 0xC2), *range(0xF5, 0x100)}
    m.accept(0xC3)
    assert allowed(m) & set(range(256)) == set(range(0x80, 0xC0))
    assert FIRST_LONGER + 7 in allowed(m)  # the rest of the character and a letter


@both
@pytest.mark.parametrize("value", ["é日本👋🏽", "naïve", "a", ""])
def test_other_alphabets_stand_in_values_names_and_choices(name, value):
    assert accepts(schema_matcher(name, {"enum": [value, "b"]}), compact(value))
    assert accepts(choice_matcher(name, [value + "z", "b"]), value + "z")
    key = {"type": "object", "properties": {value: {"type": "null"}}, "required": [value]}
    closed = {**key, "additionalProperties": False}
    assert accepts(schema_matcher(name, closed), compact({value: None}))
    assert not accepts(schema_matcher(name, {"enum": [value, "b"]}), compact(value + "c"))


@both
@pytest.mark.parametrize(
    "choice", ['"', "\\", 'a"b\\c', "a\nb\tc", "\x01\x7f", "$^.*[x]", "a/b", "'"]
)
def test_choices_are_taken_literally(name, choice):
    m = choice_matcher(name, [choice, "other"])
    assert accepts(m, choice)
    assert m.finished
    assert accepts(choice_matcher(name, [choice, "other"]), "other")


@both
def test_whitespace_is_none_or_bounded(name):
    value = {"a": "x", "n": 1}
    with_spaces = '{"a": "x", "n": 1}'
    assert accepts(schema_matcher(name, OBJECT), compact(value))
    assert not accepts(schema_matcher(name, OBJECT), with_spaces)
    loose = spaced(name)
    assert accepts(schema_matcher(name, OBJECT, **loose), with_spaces)
    assert accepts(schema_matcher(name, OBJECT, **loose), compact(value))
    assert not accepts(schema_matcher(name, OBJECT, **loose), '{"a":   "x"}')
    for space in (" ", "\n", "\t", "\r"):
        assert not accepts(schema_matcher(name, OBJECT, **loose), space + compact(value))
        m = schema_matcher(name, OBJECT, **loose)
        for byte in f'{{{space * 2}"a"'.encode():
            assert m.accept(byte)


def test_leniency_in_a_schema_is_overruled():
    sly = {"x-guidance": {"lenient": True, "whitespace_flexible": True}, **OBJECT}
    assert not accepts(schema_matcher("llguidance", sly), '{"a": "x"}')
    with pytest.raises(UnsupportedSchemaKeyword, match="not"):
        backend("llguidance").compile(
            GrammarKind.JSON_SCHEMA,
            {"x-guidance": {"lenient": True}, "type": "object", "not": {"required": ["a"]}},
            {},
        )


def test_no_key_is_written_by_number():
    m = schema_matcher("llguidance", {"type": "object"})
    for byte in b'{"\\':
        assert m.accept(byte)
    assert allowed(m) & set(range(256)) == set(b'nrbtf\\"')


@both
@pytest.mark.parametrize(
    ("kind", "content", "error"),
    [
        (GrammarKind.REGEX, "(?=a)b", InvalidRegex),
        (GrammarKind.REGEX, "(", InvalidRegex),
        (GrammarKind.GRAMMAR, "root ::= [", InvalidGrammar),
        (GrammarKind.GRAMMAR, "", InvalidGrammar),
        (GrammarKind.JSON_SCHEMA, {"type": "foo"}, InvalidSchema),
        (GrammarKind.STRUCTURAL_TAG, {}, InvalidGrammar),
    ],
)
def test_what_cannot_be_compiled_is_the_users_error(name, kind, content, error):
    with pytest.raises(error) as caught:
        backend(name).compile(kind, content, {})
    assert "/project/" not in caught.value.message
    assert "cannot be" in caught.value.message


# --- drafts ---


def sequential(m, drafts):
    """Rows as they are when each draft is accepted in turn, and how many were."""
    rows, num_legal = [allowed(m)], 0
    for token in drafts:
        if not m.accept(token):
            break
        num_legal += 1
        rows.append(allowed(m))
    m.rollback(num_legal)
    return rows, num_legal


@both
@pytest.mark.parametrize("num_drafts", range(8))
def test_rows_of_drafts_are_those_of_single_steps(name, num_drafts):
    text = [*b'{"a":"', FIRST_LONGER + 4, *"é".encode(), ord("\\"), ord("n"), *b'"}', END]
    wrong = [SPECIAL, EMPTY, END, 0, 255, WIDTH + 5, -3]
    for start in range(len(text) + 1):
        m = schema_matcher(name, OBJECT)
        for token in text[:start]:
            assert m.accept(token)
        right = (text[start:] + [END] * 8)[:num_drafts]
        chains = [right] + [[*right[:d], wrong[d], *right[d + 1 :]] for d in range(num_drafts)]
        for drafts in chains:
            expected, num_legal = sequential(m, drafts)
            masks = np.full((num_drafts + 1, vocabulary().num_words), 0x5A5A5A5A, np.int32)
            before = allowed(m)
            assert m.count_legal(drafts) == num_legal
            assert m.fill_drafts(drafts, masks) == num_legal
            assert [bits(row) for row in masks[: num_legal + 1]] == expected
            assert (masks[num_legal + 1 :] == 0x5A5A5A5A).all()
            assert allowed(m) == before
            assert m.num_tokens == start


@both
def test_random_walks_with_wrong_turns_equal_a_replay(name):
    rng = random.Random(name)
    for _ in range(20):
        m, tokens = schema_matcher(name, OBJECT), []
        for _ in range(40):
            action = rng.random()
            if action < 0.15 and tokens:
                count = rng.randint(1, len(tokens))
                m.rollback(count)
                del tokens[-count:]
            elif action < 0.3:
                drafts = [rng.randrange(-1, WIDTH + 1) for _ in range(4)]
                m.fill_drafts(drafts, np.empty((5, vocabulary().num_words), np.int32))
            else:
                token = rng.choice(sorted(allowed(m)))
                if m.accept(token):
                    tokens.append(token)
        replay = schema_matcher(name, OBJECT)
        assert all(map(replay.accept, tokens))
        assert allowed(replay) == allowed(m)
        assert (replay.can_end, replay.finished) == (m.can_end, m.finished)


# --- forced text ---


@both
def test_forced_text_comes_in_the_tokens_of_the_tokenizer(name):
    m = schema_matcher(name, OBJECT)
    first = m.forced_tokens(16)
    assert first == [FIRST_LONGER, ord("a"), FIRST_LONGER + 2, ord('"')]
    assert m.forced_tokens(2) == first[:2]
    assert m.forced_tokens(0) == []
    assert m.count_legal(first) == len(first)
    for token in first:
        assert m.accept(token)
    assert m.forced_tokens(16) == []


@both
def test_a_word_that_may_go_on_is_not_forced_but_a_last_one_is(name):
    open_end = choice_matcher(name, ["abcd", "abce"])
    assert open_end.forced_tokens(8) == []
    closed = choice_matcher(name, ["xabc"])
    assert closed.forced_tokens(8) == [ord("x"), FIRST_LONGER + 4]
    for token in closed.forced_tokens(8):
        closed.accept(token)
    assert closed.finished
    assert closed.forced_tokens(8) == []
    assert closed.accept(END)
    assert closed.forced_tokens(8) == []


@both
def test_half_of_a_character_is_no_forced_text(name):
    m = choice_matcher(name, ["-é", "-è"])
    assert m.forced_tokens(8) == [ord("-")]
    m.accept(ord("-"))
    m.accept(0xC3)
    assert m.forced_tokens(8) == []
    assert allowed(m) & set(range(256)) == {0xA9, 0xA8}


# --- the store ---


def compiled(name: str, schema: object, key: str) -> CompiledGrammar:
    payload = backend(name).compile(GrammarKind.JSON_SCHEMA, schema, {})
    return CompiledGrammar(key=key, backend=name, payload=payload, num_bytes=len(payload))


@both
def test_grammars_are_kept_by_content_within_a_budget(name):
    store = MatcherStore(budget_bytes=10_000)
    one = CompiledGrammar(
        key="1", backend=name, payload=compiled(name, OBJECT, "1").payload, num_bytes=6_000
    )
    two = CompiledGrammar(key="2", backend=name, payload=one.payload, num_bytes=6_000)
    assert accepts(store.open(one, vocabulary()), '{"a":""}')
    assert store.is_loaded(one, vocabulary())
    store.open(two, vocabulary())
    assert not store.is_loaded(one, vocabulary())
    assert store.num_bytes == 6_000
    store.forget(two, vocabulary())
    assert store.num_bytes == 0


def test_a_broken_payload_is_our_fault_not_a_crash():
    store = MatcherStore()
    for name, payload in itertools.product(BACKENDS, (b"{}", b"nonsense")):
        broken = CompiledGrammar(key="ab", backend=name, payload=payload, num_bytes=1)
        with pytest.raises(InternalError):
            store.open(broken, vocabulary())


@both
def test_tokens_that_an_adapter_adds_are_masked_with_it_alone(name):
    extra = {SIZE + 3: b"abca", WIDTH + 9: b"b", WIDTH + 10: b"<|new|>"}
    wide = vocabulary().extended(extra, special_ids=[WIDTH + 10])
    assert wide.digest != vocabulary().digest
    from plait.structured import backends

    made = backends.create(name, wide)
    payload = made.compile(GrammarKind.JSON_SCHEMA, {"type": "string"}, {})
    store = MatcherStore()
    m = store.open(CompiledGrammar(key="a", backend=name, payload=payload, num_bytes=1), wide)
    row = np.zeros(wide.num_words, np.int32)
    m.accept(ord('"'))
    m.fill(row)
    assert {SIZE + 3, WIDTH + 9} <= bits(row)
    assert WIDTH + 10 not in bits(row)
    assert m.accept(WIDTH + 9)


@pytest.mark.parametrize("name", BACKENDS)
def test_of_long_forced_text_only_a_beginning_is_encoded(name):
    one = schema_matcher(name, {"const": "ab cd " * 5_000})
    seen = []
    encode = one.vocabulary.encode
    longest = replace(one.vocabulary, encode=lambda text: seen.append(len(text)) or encode(text))
    one.vocabulary = longest
    tokens = one.forced_tokens(16)
    assert 0 < len(tokens) <= 16
    assert one.count_legal(tokens) == len(tokens)
    assert max(seen) <= 16 * 64
