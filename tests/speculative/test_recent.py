"""Drafts from recent answers: what is proposed, to whom, and what is kept."""

import pytest
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

from plait.platform.core import AdapterUse, Speculation
from plait.speculative.occurrences import BARRIER
from plait.speculative.recent import MIN_ANSWER, PROMPT_TAIL, RecentAnswers

ANSWER = [10, 11, 12, 13, 14, 15]


def ended(source, answer, prompt=(1,), **request):
    source.release(make_sequence(prompt, answer, **request))


def proposed(source, tokens, limit=8, after=(), **request):
    return source.propose(want(make_sequence(tokens, **request), limit, after))


def use(generation, scale=1.0, active_from=0):
    return AdapterUse(generation=generation, scale=scale, active_from=active_from)


@given(
    st.lists(st.integers(0, 3), min_size=MIN_ANSWER, max_size=40),
    st.lists(st.integers(0, 3), min_size=1, max_size=10),
    st.integers(1, 12),
)
def test_the_longest_match_in_an_answer_is_found(answer, tail, limit):
    source = RecentAnswers(VOCAB_SIZE)
    ended(source, answer)
    text = [1, *answer, BARRIER]
    found = longest_by_search([*text, BARRIER], tail)
    draft = proposed(source, tail, limit)
    if draft is None:
        assert found is None or _behind(text, found[1])[0] < 0 or len(_behind(text, found[1])) > 1
        return
    assert draft.source == "suffix"
    length, ends = found
    assert draft.bucket == length.bit_length() - 1
    assert any(copy_by_search(text, (), end, limit)[:1] == draft.tokens[:1] for end in ends)
    if len(ends) == 1:
        assert draft.tokens == copy_by_search(text, (), ends[0], limit)
        assert draft.chances == ()
    else:
        assert len(draft.chances) == len(draft.tokens)


def _behind(text, ends):
    return sorted({text[end] for end in ends})


def test_the_most_frequent_continuation_is_proposed_with_its_frequencies():
    source = RecentAnswers(VOCAB_SIZE)
    for answer in ([5, 6, 7, 8, 20], [5, 6, 7, 8, 21], [5, 6, 7, 8, 21], [5, 6, 9, 9, 22]):
        ended(source, answer, prompt=(50,))
    draft = proposed(source, [50, 5, 6])
    assert draft.tokens == (7, 8, 21)
    assert draft.chances == pytest.approx((3 / 4, 1, 2 / 3))


def test_a_chain_ends_where_its_chance_is_small():
    source = RecentAnswers(VOCAB_SIZE)
    for other in range(6):  # the first token is sure, the next has a chance of one in six
        ended(source, [5, 6, 7, 20 + other], prompt=(50,))
    draft = proposed(source, [50, 5, 6])
    assert (draft.tokens, draft.chances) == ((7,), (1.0,))


def test_where_answers_begin_is_known_from_the_end_of_the_prompt():
    source = RecentAnswers(VOCAB_SIZE)
    ended(source, ANSWER, prompt=[70, 71, 72, 90, 91, 92, 93])
    assert proposed(source, [80, 81, 90, 91, 92, 93]).tokens == tuple(ANSWER)
    assert source.num_tokens == PROMPT_TAIL + len(ANSWER) + 1
    assert proposed(source, [71, 72]) is None  # the rest of the prompt is not kept


def test_nothing_is_proposed_across_two_answers():
    source = RecentAnswers(VOCAB_SIZE)
    ended(source, ANSWER, prompt=(60,))
    ended(source, [20, 21, 22, 23], prompt=(60,))
    assert proposed(source, [14], 8).tokens == (15,)
    assert proposed(source, [15]) is None
    assert proposed(source, ANSWER, 8, after=(60, 20)).tokens == (21, 22, 23)


KINDS = {
    "tenant": {"tenant": "a"},
    "another tenant": {"tenant": "b"},
    "salt": {"cache_salt": "s"},
    "tenant and salt": {"tenant": "a", "cache_salt": "s"},
    "adapter": {"adapters": (use("A"),)},
    "another adapter": {"adapters": (use("B"),)},
    "another scale": {"adapters": (use("A", 0.5),)},
    "both adapters": {"adapters": (use("A"), use("B"))},
    "nothing": {},
}


@pytest.mark.parametrize("giver", KINDS)
def test_answers_serve_their_own_kind_alone(giver):
    source = RecentAnswers(VOCAB_SIZE)
    ended(source, ANSWER, **KINDS[giver])
    for taker, request in KINDS.items():
        draft = proposed(source, [10, 11, 12], **request)
        assert (draft is not None) == (taker == giver), taker


def test_the_order_of_adapters_and_where_they_begin_make_no_other_kind():
    source = RecentAnswers(VOCAB_SIZE)
    ended(source, ANSWER, adapters=(use("A"), use("B", active_from=3)))
    assert proposed(source, [10, 11], adapters=(use("B", active_from=5), use("A"))) is not None


def test_a_forgotten_generation_leaves_nothing():
    source = RecentAnswers(VOCAB_SIZE)
    for request in KINDS.values():
        ended(source, ANSWER, **request)
    source.forget("A")
    assert source.num_kinds == len(KINDS) - 3
    for request in KINDS.values():
        with_it = any(used.generation == "A" for used in request.get("adapters", ()))
        assert (proposed(source, [10, 11], **request) is None) == with_it
    assert source.num_tokens == source.num_kinds * (1 + len(ANSWER) + 1)
    source.forget("A")
    assert source.num_kinds == len(KINDS) - 3


def test_images_and_unknown_ids_are_neither_kept_nor_proposed():
    source = RecentAnswers(VOCAB_SIZE)
    image = make_image(1, 2)
    ended(source, [10, 11, 500, 12, 13], prompt=[8, 9, 9, 7], images=(image,))
    assert proposed(source, [8]) is None
    assert proposed(source, [9, 9]) is None
    assert proposed(source, [7]).tokens == (10, 11)
    assert proposed(source, [3, 9, 9], images=(image,)) is None
    assert proposed(source, [10], after=(500,)) is None


@pytest.mark.parametrize(
    ("request_fields", "answer"),
    [({"speculation": Speculation(enabled=False)}, ANSWER), ({}, ANSWER[: MIN_ANSWER - 1])],
)
def test_what_asked_for_no_drafts_or_hardly_answered_is_not_kept(request_fields, answer):
    source = RecentAnswers(VOCAB_SIZE)
    ended(source, answer, **request_fields)
    assert (source.num_kinds, source.num_tokens, source.num_bytes) == (0, 0, 0)


def test_the_newest_answers_stay_and_the_oldest_go():
    source = RecentAnswers(1 << 20, max_tokens=64, max_tokens_of_kind=64)
    for first in range(0, 1000, 10):
        ended(source, range(1000 + first, 1010 + first))
        assert source.num_tokens <= 64
        assert proposed(source, [1000 + first, 1001 + first]).tokens[0] == 1002 + first
        if first:
            assert proposed(source, [990 + first, 991 + first]) is not None
    assert proposed(source, [1000, 1001]) is None


def test_of_a_huge_answer_the_beginning_is_kept():
    source = RecentAnswers(1 << 20, max_tokens=64)
    ended(source, range(1000, 2000))
    assert source.num_tokens <= 64 // 4 + 1
    assert proposed(source, [1000], 3).tokens == (1001, 1002, 1003)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.booleans()), max_size=60),
    st.integers(1, 6),
)
def test_bounds_hold_and_counts_are_true(steps, max_kinds):
    source = RecentAnswers(VOCAB_SIZE, max_tokens=120, max_tokens_of_kind=60, max_kinds=max_kinds)
    for tenant, length, asks in steps:
        if asks:
            proposed(source, [1, 2], tenant=str(tenant))
        else:
            ended(source, [i % 7 for i in range(length)], tenant=str(tenant))
            kept = [len(answers) for answers in source._kinds.values()]
            assert source.num_tokens == sum(kept) <= 120
            assert len(kept) <= max_kinds
            assert max(kept, default=0) <= 60


def test_the_kind_that_was_not_used_for_longest_goes_first():
    source = RecentAnswers(VOCAB_SIZE, max_kinds=2)
    ended(source, ANSWER, tenant="a")
    ended(source, ANSWER, tenant="b")
    assert proposed(source, [10], tenant="a") is not None
    ended(source, ANSWER, tenant="c")
    assert proposed(source, [10], tenant="b") is None
    assert proposed(source, [10], tenant="a") is not None
