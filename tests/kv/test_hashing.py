import struct
from dataclasses import replace
from hashlib import sha256

import pytest

from plait.platform.core import Request, SamplingParams
from plait.platform.kv.hashing import KeyChain

TOKENS = tuple(range(100, 112))
REQUEST = Request(
    request_id="r", prompt_token_ids=TOKENS, params=SamplingParams(), cache_salt="s", adapter="g"
)


def keys(request=REQUEST, tokens=TOKENS, block_size=4):
    return KeyChain(request, block_size).extend(tokens, len(tokens) // block_size)


def test_keys_follow_the_documented_encoding():
    framed = [b"\x01" + struct.pack("<Q", 1) + value for value in (b"s", b"g")]
    parent = sha256(b"plait.kv.1" + struct.pack("<I", 4) + b"".join(framed)).digest()
    expected = []
    for start in (0, 4, 8):
        parent = sha256(parent + struct.pack("<4I", *TOKENS[start : start + 4])).digest()
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
        {"adapter": None},
        {"adapter": ""},
        {"adapter": "h"},
        {"cache_salt": "sg", "adapter": ""},
        {"cache_salt": "", "adapter": "sg"},
        {"cache_salt": "g", "adapter": "s"},
    ],
)
def test_salt_and_generation_change_every_key(change):
    assert not set(keys()) & set(keys(replace(REQUEST, **change)))


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
