"""Each image crosses to an engine once while anyone needs it, and is forgotten then."""

from __future__ import annotations

import random

import pytest

from plait.platform.core import Array, ImageItem, Request, SamplingParams
from plait.platform.kept_images import KeptImages
from plait.platform.messages import Add, ForgetImages, SendImages
from plait.platform.server.sent_images import SentImages


def item(key: str, start: int = 0) -> ImageItem:
    array = Array(dtype="uint8", shape=(len(key),), data=key.encode())
    return ImageItem(
        key=key, start=start, num_tokens=1, embedded=((0, 1),), tensors={"pixel_values": array}
    )


def request(name: str, *keys: str, salt: str = "") -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=(1,) * max(1, len(keys)),
        params=SamplingParams(),
        images=tuple(item(key, start) for start, key in enumerate(keys)),
        cache_salt=salt,
    )


def test_an_image_is_sent_again_only_when_nobody_needed_it() -> None:
    sent = SentImages()
    first, messages = sent.lend(request("1", "a", "b", "a"), 5.0)
    images, add = messages
    assert isinstance(images, SendImages)
    assert isinstance(add, Add)
    assert set(images.images) == {"\0a", "\0b"}
    assert add.timeout_s == 5.0
    assert all(not item.tensors for item in add.request.images)
    second, messages = sent.lend(request("2", "b"), None)
    assert [type(message) for message in messages] == [Add]
    assert sent.give_back(first) == ("\0a",)
    assert sent.give_back(second) == ("\0b",)
    assert [type(message) for message in sent.lend(request("3", "b"), None)[1]] == [SendImages, Add]
    assert [type(message) for message in sent.lend(request("4"), None)[1]] == [Add]


def test_no_salt_shares_with_another() -> None:
    sent = SentImages()
    sent.lend(request("1", "a", salt="x"), None)
    for salt in ("y", ""):
        assert len(sent.lend(request(salt, "a", salt=salt), None)[1]) == 2
    assert len(sent.lend(request("2", "a", salt="x"), None)[1]) == 1


def test_a_new_engine_is_sent_everything_and_told_nothing_of_the_old() -> None:
    sent = SentImages()
    old, _ = sent.lend(request("1", "a"), None)
    sent.renew()
    new, messages = sent.lend(request("2", "a"), None)
    assert len(messages) == 2
    assert sent.give_back(old) == ()
    assert len(sent.lend(request("3", "a"), None)[1]) == 1
    assert sent.give_back(new) == ()


@pytest.mark.parametrize("seed", range(5))
def test_the_engine_has_every_image_of_every_request_and_nothing_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    sent, images = SentImages(), KeptImages()
    open_requests = []
    for number in range(300):
        if open_requests and rng.random() < 0.5:
            lent = open_requests.pop(rng.randrange(len(open_requests)))
            images.take(ForgetImages(names=sent.give_back(lent)))
            continue
        keys = rng.choices("abcdef", k=rng.randrange(4))
        asked = request(str(number), *keys, salt=rng.choice(("", "x")))
        lent, messages = sent.lend(asked, None)
        open_requests.append(lent)
        for message in messages:
            if isinstance(message, SendImages):
                images.take(message)
            else:
                assert images.complete(message.request) == asked
    for lent in open_requests:
        images.take(ForgetImages(names=sent.give_back(lent)))
    assert len(images) == 0
