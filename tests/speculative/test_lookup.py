"""Drafts from a sequence's own text, against a search by brute force."""

import random
import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from support.lookup_texts import (
    VOCAB_SIZE,
    copy_by_search,
    longest_by_search,
    make_image,
    make_sequence,
    want,
)

from plait.speculative.lookup import SequenceLookup
from plait.speculative.occurrences import BARRIER, NUM_IDS, Occurrences

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=30)
# No token more often than a chain is walked: where it is, the longest match may lie too far back.
LONG_TEXTS = st.lists(st.integers(0, 40), min_size=1, max_size=300).filter(
    lambda text: max(Counter(text).values()) <= 32
)
WITH_BARRIERS = st.lists(st.integers(-1, 12), max_size=150).filter(
    lambda text: max(Counter(text).values(), default=0) <= 32
)
TAILS = st.lists(st.integers(-1, 12), max_size=6)


def expected(text, after, limit):
    found = longest_by_search(text, after)
    if found is None:
        return None
    length, ends = found
    tokens = copy_by_search(text, after, ends[0], limit)
    return (tokens, length.bit_length() - 1) if tokens else None


def proposed(source, sequence, limit=8, after=()):
    draft = source.propose(want(sequence, limit, after))
    return None if draft is None else (draft.tokens, draft.bucket)


@given(TEXTS, st.lists(st.integers(0, 3), max_size=4), st.integers(1, 12))
def test_what_follows_the_latest_of_the_longest_matches_is_proposed(text, after, limit):
    draft = proposed(SequenceLookup(VOCAB_SIZE), make_sequence(text), limit, after)
    assert draft == expected(text, after, limit)


@given(LONG_TEXTS)
def test_long_texts_are_matched_alike(text):
    assert proposed(SequenceLookup(VOCAB_SIZE), make_sequence(text)) == expected(text, (), 8)


@given(LONG_TEXTS, st.lists(st.integers(1, 90), max_size=12))
def test_a_text_read_bit_by_bit_is_matched_as_one_read_at_once(text, pieces):
    source, sequence = SequenceLookup(VOCAB_SIZE), make_sequence(text[:1])
    for piece in pieces:
        size = len(sequence.tokens)
        sequence.tokens += text[size : size + piece]
        assert proposed(source, sequence) == expected(sequence.tokens, (), 8)
    assert source.num_tokens == (len(sequence.tokens) if pieces else 0)


def test_a_text_keeps_its_matches_as_its_chains_grow():
    rng = random.Random(0)
    source, sequence = SequenceLookup(1000), make_sequence([1])
    while len(sequence.tokens) < 1500:
        sequence.tokens += [rng.randrange(1000) for _ in range(rng.choice((1, 3, 70)))]
        start = rng.randrange(len(sequence.tokens))
        sequence.tokens += sequence.tokens[start : start + 5]  # what was said before
        assert proposed(source, sequence) == expected(sequence.tokens, (), 8)


@given(WITH_BARRIERS, TAILS)
def test_all_ends_of_the_longest_match_are_found_and_barriers_never_match(text, tail):
    occurrences = Occurrences()
    occurrences.extend(text)
    match = occurrences.longest(tail, len(text), most=32)
    found = _longest_elsewhere(text, tail)
    assert (match and (match.length, list(match.ends))) == found
    if found is not None:
        assert list(occurrences.longest(tail, len(text), most=2).ends) == found[1][:2]


def _longest_elsewhere(text, tail):
    """With a text that `tail` is no part of."""
    return longest_by_search([*text, BARRIER], tail) if tail else None


def test_a_text_that_repeats_goes_on_repeating():
    sequence = make_sequence([1, 2, 3, 1, 2])
    assert proposed(SequenceLookup(VOCAB_SIZE), sequence, 7) == ((3, 1, 2, 3, 1, 2, 3), 1)
    assert proposed(SequenceLookup(VOCAB_SIZE), make_sequence([5, 5]), 4) == ((5, 5, 5, 5), 0)


def test_drafts_go_on_behind_forced_text():
    sequence = make_sequence([1, 2, 3, 4, 5, 6, 7, 1])
    assert proposed(SequenceLookup(VOCAB_SIZE), sequence, 3, after=(2, 3)) == ((4, 5, 6), 1)


def test_images_are_neither_matched_nor_proposed():
    # Placeholders (9) at 2-5; the text behind them repeats the text before them.
    prompt = [1, 2, 9, 9, 9, 9, 3, 1, 2]
    sequence = make_sequence(prompt, images=(make_image(2, 4),))
    source = SequenceLookup(VOCAB_SIZE)
    assert proposed(source, sequence) is None
    sequence.tokens += [9, 9]  # the same id, said by the model: an image is no earlier occurrence
    assert proposed(source, sequence, 2) == ((9, 9), 0)
    assert proposed(SequenceLookup(VOCAB_SIZE), make_sequence(prompt), 2) == ((9, 9), 1)


def test_an_image_is_left_out_however_the_text_was_read():
    prompt = [1, 2, 3, 9, 9, 9, 4, 1, 2, 3]
    for read in range(1, len(prompt)):
        source = SequenceLookup(VOCAB_SIZE)
        sequence = make_sequence(prompt, images=(make_image(3, 3),))
        sequence.tokens = prompt[:read]
        proposed(source, sequence)
        sequence.tokens = list(prompt)
        assert proposed(source, sequence) is None
        sequence.tokens += [4]
        assert proposed(source, sequence, 3) == ((1, 2, 3), 0)
        assert source.num_tokens == len(sequence.tokens)


def test_ids_outside_the_vocabulary_are_never_proposed():
    text = [1, 2, 100, 1, 2]
    assert proposed(SequenceLookup(VOCAB_SIZE), make_sequence(text)) is None
    assert proposed(SequenceLookup(VOCAB_SIZE), make_sequence(text, vocab_size=101), 1)
    assert proposed(SequenceLookup(VOCAB_SIZE), make_sequence([1, 1]), after=(100,)) is None
    assert proposed(SequenceLookup(VOCAB_SIZE), make_sequence([1, 1]), after=(-1,)) is None
    huge = [1, NUM_IDS, 1]
    assert proposed(SequenceLookup(1 << 30), make_sequence(huge)) is None


def test_the_largest_ids_are_chained_alike_one_by_one_and_at_once():
    text = [NUM_IDS - 1, NUM_IDS - 2, NUM_IDS - 3, 0] * 30
    at_once, one_by_one = Occurrences(), Occurrences()
    at_once.extend(text)
    for token in text:
        one_by_one.extend([token])
    for stop in (20, 120):
        tail = text[:20]
        assert at_once.longest(tail, stop, 9) == one_by_one.longest(tail, stop, 9)
    assert at_once.longest(text, 119).ends == (116,)


def test_nothing_is_proposed_where_nothing_is_wanted():
    assert proposed(SequenceLookup(VOCAB_SIZE), make_sequence([1, 1, 1]), 0) is None


def test_nothing_is_left_of_released_sequences():
    source = SequenceLookup(VOCAB_SIZE)
    sequences = [make_sequence([1, 2, 1], seq_id=i) for i in range(5)]
    for sequence in sequences:
        assert proposed(source, sequence) is not None
    assert source.num_tokens == 15
    for sequence in sequences:
        source.release(sequence)
        source.release(sequence)  # twice does no harm
    assert source.num_tokens == source.num_bytes == 0


def test_of_long_texts_the_last_part_alone_is_kept():
    source, sequence = SequenceLookup(VOCAB_SIZE, max_tokens=64), make_sequence([1, 2, 3])
    for i in range(300):
        sequence.tokens += [4 + i % 50, 1]
        draft = source.propose(want(sequence))
        assert source.num_tokens <= 64
        text = sequence.tokens[-48:]  # that is the least it keeps
        assert draft is not None or longest_by_search(text) is None
    assert source.num_bytes < 64 * 28 + 4 * 1024


def test_memory_of_a_long_prompt_is_at_most_28_bytes_a_token():
    source, sequence = SequenceLookup(1 << 20), make_sequence(range(8192))
    assert source.propose(want(sequence)) is None
    assert source.num_bytes <= 28 * 8192


def test_a_text_of_one_token_repeated_takes_no_more_than_linear_time():
    source, sequence = SequenceLookup(VOCAB_SIZE), make_sequence([7] * 8192)
    began = time.process_time()
    for _ in range(500):
        sequence.tokens.append(7)
        assert proposed(source, sequence) == ((7,) * 8, 6)
    assert time.process_time() - began < 5  # a quadratic walk would take minutes
