"""The encoder cache: within its bytes, by content, and nothing that is held is evicted."""

import random
from dataclasses import replace

import pytest
import torch

from plait.platform.core import AdapterUse, ImageItem, Request, SamplingParams
from plait.platform.errors import InternalError
from plait.vision.encoder_cache import EncoderCache, EntryState, encoder_key

ITEM = ImageItem(key="k", start=4, num_tokens=3, embedded=((0, 3),), tensors={})
USE = AdapterUse(generation="g", tower_digest="t")
REQUEST = Request(
    request_id="r", prompt_token_ids=(1,) * 9, params=SamplingParams(), images=(ITEM,),
    adapters=(USE,),
)  # fmt: skip


def rows(num_rows, value=0.0):
    return torch.full((num_rows, 2), value)


def reserve(cache, key, num_rows=1):
    return cache.try_reserve(key, num_rows, num_rows * 8)


def test_random_lives_keep_to_the_bytes_and_evict_the_oldest_that_nobody_holds():
    rng = random.Random(0)
    for _ in range(40):
        cache = EncoderCache(rng.choice([16, 40, 100]))
        sizes = [rng.randrange(1, 6) for _ in range(12)]
        held, idle, wanted = [], [], {}
        for _ in range(120):
            if held and rng.random() < 0.5:
                key, reservation = held.pop(rng.randrange(len(held)))
                if rng.random() < 0.7:
                    reservation.commit(rows(sizes[key], float(key)))
                    wanted[key] = True
                reservation.release()
                if key not in (k for k, _ in held):
                    idle += [key] if wanted.get(key) else []
                    if not wanted.get(key):
                        assert bytes([key]) not in cache
            else:
                key = rng.randrange(12)
                was_there = bytes([key]) in cache
                reservation = reserve(cache, bytes([key]), sizes[key])
                in_use = {k for k, _ in held} | {key}
                fits = sum(sizes[k] for k in in_use) * 8 <= cache.capacity
                assert (reservation is not None) == (was_there or fits)
                if reservation is None:
                    continue
                if was_there and wanted.get(key):
                    assert reservation.entry.rows.tolist() == rows(sizes[key], key).tolist()
                if key in idle:
                    idle.remove(key)
                gone = [k for k in idle if bytes([k]) not in cache]
                assert gone == idle[: len(gone)], "not the oldest went"
                idle = idle[len(gone) :]
                wanted |= dict.fromkeys(gone, False)
                held.append((key, reservation))
            cache.check_integrity(reservation for _, reservation in held)
        for _, reservation in held:
            reservation.release()
        cache.check_integrity(())
        assert not cache.num_computing_rows


def test_what_was_not_computed_is_gone_once_nobody_holds_it():
    cache = EncoderCache(16)
    one, other = reserve(cache, b"a"), reserve(cache, b"a")
    assert one.entry is other.entry
    assert one.entry.state is EntryState.COMPUTING
    one.release()
    assert b"a" in cache
    other.release()
    assert (b"a" in cache, cache.num_bytes) == (False, 0)


def test_rows_of_another_size_are_refused_and_parts_of_larger_tensors_copied():
    cache = EncoderCache(80)
    reservation = reserve(cache, b"a", 2)
    with pytest.raises(InternalError, match="made 3 embeddings of 24 bytes, not 2 of 16"):
        reservation.commit(rows(3))
    reservation.commit(rows(9)[2:4])
    assert reservation.entry.rows.untyped_storage().nbytes() == 16


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"request_id": "s", "tenant": "x"}, True),
        ({"adapters": (replace(USE, generation="h", kv_digest="l"),)}, True),
        ({"adapters": (USE, AdapterUse(generation="l", kv_digest="l"))}, True),
        ({"adapters": (replace(USE, active_from=5),)}, False),  # behind the image's start
        ({"adapters": ()}, False),
        ({"adapters": (replace(USE, scale=0.5),)}, False),
        ({"adapters": (replace(USE, tower_digest="u"),)}, False),
        ({"adapters": (USE, replace(USE, tower_digest="u"))}, False),
        ({"cache_salt": "s"}, False),
    ],
)
def test_a_key_tells_content_tower_and_salt_and_nothing_else(change, same):
    assert (encoder_key(replace(REQUEST, **change), ITEM) == encoder_key(REQUEST, ITEM)) == same


def test_adapters_in_another_order_and_other_images_have_other_keys():
    a, b = USE, AdapterUse(generation="h", tower_digest="u")
    orders = [encoder_key(replace(REQUEST, adapters=uses), ITEM) for uses in ((a, b), (b, a))]
    moved = replace(ITEM, start=0, num_tokens=4)
    items = (replace(ITEM, key="l"), replace(ITEM, embedded=((0, 2),)))
    keys = [*orders, *(encoder_key(REQUEST, item) for item in (ITEM, *items))]
    assert len(set(keys)) == 5
    assert encoder_key(REQUEST, moved) == encoder_key(REQUEST, ITEM)
