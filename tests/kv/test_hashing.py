import struct
from dataclasses import replace
from hashlib import sha256

import pytest

from plait.platform.core import AdapterUse, ImageItem, Request, SamplingParams
from plait.platform.kv.hashing import KeyChain

TOKENS = tuple(range(100, 112))
USE = AdapterUse(generation="g", kv_digest="k", draft="d", scale=0.5)
REQUEST = Request(
    request_id="r",
    prompt_token_ids=TOKENS,
    params=SamplingParams(),
    cache_salt="s",
    adapters=(USE,),
)


def keys(request=REQUEST, tokens=TOKENS, block_size=4):
    return KeyChain(request, block_size).extend(tokens, len(tokens) // block_size)


def test_keys_follow_the_documented_encoding():
    salt, digest, draft = (struct.pack("<Q", 1) + value for value in (b"s", b"k", b"d"))
    extras = b"adapter" + digest + draft + struct.pack("<dI", 0.5, 0)
    parent = sha256(b"plait.kv.3" + struct.pack("<I", 4) + salt).digest()
    expected = []
    for start in (0, 4, 8):
        tokens = struct.pack("<4I", *TOKENS[start : start + 4])
        parent = sha256(parent + tokens + extras).digest()
        expected.append(parent)
    assert keys() == expected


@pytest.mark.parametrize("position", range(12))
def test_one_token_changes_its_block_and_all_after_it(position):
    tokens = [*TOKENS[:position], 7, *TOKENS[position + 1 :]]
    same = [ours == theirs for ours, theirs in zip(keys(), keys(tokens=tokens), strict=True)]
    assert same == [i < position // 4 for i in range(3)]


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": ""},
        {"cache_salt": "t"},
        {"adapters": ()},
        {"adapters": (replace(USE, kv_digest="j"),)},
        {"adapters": (replace(USE, draft="e"),)},
        {"adapters": (replace(USE, scale=0.25),)},
        {"adapters": (USE, USE)},
        {"adapters": (USE, replace(USE, kv_digest="j"))},
        {"cache_salt": "k", "adapters": (replace(USE, kv_digest="s"),)},
    ],
)
def test_salt_and_adapters_change_every_key(change):
    assert not set(keys()) & set(keys(replace(REQUEST, **change)))


def test_the_order_of_adapters_counts():
    other = replace(USE, kv_digest="j")
    one, two = (replace(REQUEST, adapters=uses) for uses in ((USE, other), (other, USE)))
    assert not set(keys(one)) & set(keys(two))


def test_an_adapter_that_cannot_change_kv_shares_the_bases_blocks():
    headless = replace(REQUEST, adapters=(replace(USE, kv_digest="", draft=""),))
    assert keys(headless) == keys(replace(REQUEST, adapters=()))
    drafting = replace(REQUEST, adapters=(replace(USE, kv_digest=""),))
    assert not set(keys(drafting)) & set(keys(headless))


@pytest.mark.parametrize("active_from", range(13))
def test_blocks_before_an_adapter_is_active_are_the_bases(active_from):
    later = replace(REQUEST, adapters=(replace(USE, active_from=active_from),))
    base = keys(replace(REQUEST, adapters=()))
    same = [ours == theirs for ours, theirs in zip(keys(later), base, strict=True)]
    assert same == [4 * (i + 1) <= active_from for i in range(3)]


def test_another_block_size_shares_no_key():
    assert not set(keys()) & set(keys(block_size=2))


def test_equal_blocks_at_other_places_have_other_keys():
    assert len(set(keys(tokens=[1, 2, 3, 4] * 3))) == 3


@pytest.mark.parametrize(
    "change",
    [{"request_id": "q"}, {"priority": 3}, {"params": SamplingParams(temperature=0.3, seed=4)}],
)
def test_what_does_not_change_kv_does_not_change_keys(change):
    assert keys() == keys(replace(REQUEST, **change))


def test_a_chain_grown_in_pieces_or_copied_is_the_chain_made_at_once():
    chain = KeyChain(REQUEST, 4)
    chain.extend(TOKENS, 1)
    copy = chain.copy(1)
    chain.extend(TOKENS, 3)
    assert copy.extend(TOKENS, 3) == chain.keys == keys()


# --- images --------------------------------------------------------------------------------------

ITEM = ImageItem(key="i", start=5, num_tokens=5, embedded=((0, 5),), tensors={})
PICTURED = replace(REQUEST, adapters=(), images=(ITEM,))  # the second block and half the third
TOWER = AdapterUse(generation="t", tower_digest="t")


def first_change(one, other):
    """The first block whose key differs; 3: none."""
    same = [a == b for a, b in zip(keys(one), keys(other), strict=True)]
    assert same == sorted(same, reverse=True)
    return sum(same)


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"images": (replace(ITEM, key="j"),)}, 1),
        ({"images": (replace(ITEM, start=6, num_tokens=4),)}, 1),
        ({"images": ()}, 1),
        ({"adapters": (TOWER,)}, 1),
        ({"adapters": (replace(TOWER, active_from=6),)}, 3),  # behind the image's start
        ({"adapters": (replace(TOWER, generation="u"),)}, 1),
        ({"vision_digest": "d"}, 0),
        ({"spans": ((5, 10),)}, 1),
    ],
)
def test_an_image_changes_the_keys_from_its_first_block_on(change, first):
    assert first_change(PICTURED, replace(PICTURED, **change)) == first


def test_scales_of_an_adapter_of_the_tower_keep_images_apart_and_text_together():
    full, half = (replace(PICTURED, adapters=(replace(TOWER, scale=s),)) for s in (1.0, 0.5))
    assert first_change(full, half) == 1
    assert first_change(replace(full, images=()), replace(half, images=())) == 3


def test_where_tokens_see_later_ones_a_block_tells_all_that_they_see():
    """A span from position 1 to the end: all its blocks hang on the image and on adapters in it."""
    whole = replace(PICTURED, spans=((1, 12),))
    assert first_change(whole, replace(whole, images=(replace(ITEM, key="j"),))) == 0
    late = (replace(USE, active_from=11),)
    assert first_change(whole, replace(whole, adapters=late)) == 0
    assert first_change(PICTURED, replace(PICTURED, adapters=late)) == 2
    assert first_change(whole, replace(whole, adapters=(replace(TOWER, active_from=4),))) == 0
