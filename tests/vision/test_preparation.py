"""Images of requests: together, within shared memory, without holding up anything else."""

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import pytest
from support.images import data_url, empty_png, encoded, picture, with_text_bomb

from plait.platform.errors import BadRequest, ImageTooLarge, InvalidImage, Overloaded
from plait.vision import preparation as module
from plait.vision.budget import ByteBudget
from plait.vision.limits import ImageLimits
from plait.vision.parts import ImagePart, PartReader
from plait.vision.preparation import ImagePreparation
from plait.vision.sources import DataUrl


@pytest.fixture
def anyio_backend():
    return "asyncio"


pytestmark = pytest.mark.anyio


def part(data: bytes, at: int = 0, detail: str = "auto") -> ImagePart:
    return ImagePart(at=f"content[{at}]", source=DataUrl(url=data_url(data)), detail=detail)


@pytest.fixture
def make():
    made = []

    def preparation(**limits):
        made.append(ImagePreparation(ImageLimits(**limits)))
        return made[-1]

    yield preparation
    for each in made:
        each.close()


@pytest.fixture
def slow_decoder(monkeypatch):
    """Decoding waits for `go`; `seen` lists what was decoded."""

    class Gate:
        def __init__(self):
            self.go, self.began, self.seen = threading.Event(), threading.Event(), []

    gate, real = Gate(), module.decode

    def decode(info):
        gate.seen.append(info.digest)
        gate.began.set()
        gate.go.wait()
        return real(info)

    monkeypatch.setattr(module, "decode", decode)
    yield gate
    gate.go.set()


async def test_images_come_in_their_order(make):
    pictures = [picture(10 + i, 9, i) for i in range(6)]
    images = await make().prepare([part(encoded(p), i) for i, p in enumerate(pictures)])
    for given, image in zip(pictures, images, strict=True):
        assert np.array_equal(image.pixels, np.asarray(given))
    assert await make().prepare([]) == []


async def test_an_error_names_its_image_and_gives_all_memory_back(make):
    preparation = make()
    good = part(encoded(picture()))
    with pytest.raises(InvalidImage, match=r"^content\[1\]: .*TIFF") as error:
        await preparation.prepare([good, part(encoded(picture(), "TIFF"), 1)])
    assert error.value.param == "content[1]"
    assert preparation.files.used == preparation.pixels.used == 0


async def test_bounds_of_a_whole_request(make):
    data = encoded(picture(100, 100))
    two = [part(data), part(data, 1)]
    with pytest.raises(ImageTooLarge, match="max-images"):
        await make(num_images=1).prepare(two)
    with pytest.raises(ImageTooLarge, match="20000 pixels together"):
        await make(image_pixels=10_000, request_pixels=19_999).prepare(two)
    with pytest.raises(ImageTooLarge, match="files are larger"):
        await make(request_bytes=2 * len(data) - 1).prepare(two)
    assert len(await make(request_bytes=2 * len(data)).prepare(two)) == 2


async def test_decoded_pixels_stay_counted_until_nobody_holds_them(make):
    preparation = make()
    (first, second) = await preparation.prepare(
        [part(encoded(picture())), part(encoded(picture()))]
    )
    assert preparation.files.used == 0
    assert preparation.pixels.used >= first.pixels.nbytes
    view = first.pixels[:4]
    del first, second
    gc.collect()
    assert preparation.pixels.used > 0  # the view keeps them
    del view
    await asyncio.sleep(0)  # the loop still has callbacks that know the results
    gc.collect()
    assert preparation.pixels.used == 0


async def test_without_room_a_request_waits_and_then_is_told_to_come_again(make):
    num_pixels = 100 * 100
    tight = {"image_pixels": num_pixels, "request_pixels": num_pixels}
    preparation = make(**tight, pixel_budget_bytes=3 * num_pixels, wait_s=0.05)
    data = encoded(picture(100, 100))
    held = await preparation.prepare([part(data)])
    with pytest.raises(Overloaded, match="decoded images"):
        await preparation.prepare([part(data)])
    assert preparation.files.used == 0
    patient = make(**tight, pixel_budget_bytes=3 * num_pixels)
    held = await patient.prepare([part(data)])
    waiting = asyncio.ensure_future(patient.prepare([part(data)]))
    while not patient.pixels._waiting:
        await asyncio.sleep(0)
    del held
    assert len(await waiting) == 1


async def test_who_asked_first_is_served_first():
    budget = ByteBudget(10, what="things", wait_s=30)
    held = await budget.reserve(8)
    large = asyncio.ensure_future(budget.reserve(9))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(budget.reserve(1))
    await asyncio.sleep(0)
    assert not small.done()  # it would fit, but would starve the large one
    held.free()
    held.free()  # twice is once
    (await large).free()
    (await small).free()
    assert budget.used == 0


async def test_whoever_leaves_the_queue_lets_the_next_one_in():
    budget = ByteBudget(10, what="things", wait_s=30)
    held = await budget.reserve(8)
    large = asyncio.ensure_future(budget.reserve(9))
    await asyncio.sleep(0)
    small = asyncio.ensure_future(budget.reserve(2))
    await asyncio.sleep(0)
    large.cancel()
    (await small).free()
    held.free()
    assert budget.used == 0


async def test_the_same_file_in_flight_is_decoded_once(make, slow_decoder):
    preparation = make()
    data = encoded(picture())
    requests = [asyncio.ensure_future(preparation.prepare([part(data)])) for _ in range(5)]
    await asyncio.to_thread(slow_decoder.began.wait)
    while sum(shared.num_waiting for shared in preparation._decoding.values()) < 5:
        await asyncio.sleep(0)
    slow_decoder.go.set()
    images = [image for (image,) in await asyncio.gather(*requests)]
    assert len(slow_decoder.seen) == 1
    assert len({id(image.pixels) for image in images}) == 1
    assert preparation._decoding == {}


async def test_a_client_that_goes_away_takes_its_image_along_and_no_other(make, slow_decoder):
    preparation = make(num_threads=1)
    first = asyncio.ensure_future(preparation.prepare([part(encoded(picture(seed=1)))]))
    await asyncio.to_thread(slow_decoder.began.wait)
    # Both wait for the same image, which waits for the only thread.
    data = encoded(picture(seed=2))
    queued = [asyncio.ensure_future(preparation.prepare([part(data)])) for _ in range(2)]
    first.cancel()
    queued[0].cancel()
    for cancelled in (first, queued[0]):
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    slow_decoder.go.set()
    (image,) = await queued[1]
    assert np.array_equal(image.pixels, np.asarray(picture(seed=2)))
    assert preparation.files.used == 0
    assert preparation._decoding == {}


async def test_a_client_that_goes_away_at_once_leaves_nothing_begun(make):
    preparation = make()
    task = asyncio.ensure_future(preparation.prepare([part(encoded(picture()))]))
    await asyncio.sleep(0)  # its parts are scheduled, and have not run
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()
    assert [str(each.message) for each in warned] == []
    assert preparation.files.used == 0


async def test_the_event_loop_runs_on_while_images_are_decoded(make, slow_decoder):
    task = asyncio.ensure_future(make().prepare([part(encoded(picture()))]))
    await asyncio.to_thread(slow_decoder.began.wait)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    slow_decoder.go.set()
    assert len(await task) == 1


async def test_low_detail_is_smaller_and_another_image(make):
    data = encoded(picture(1024, 300))
    high, auto, low = await make().prepare([part(data, detail=d) for d in ("high", "auto", "low")])
    assert high.digest == auto.digest != low.digest
    assert (low.width, low.height) == (512, 150)
    small = encoded(picture(512, 3))
    auto, low = await make().prepare([part(small), part(small, detail="low")])
    assert auto.digest == low.digest


def run_in_process(lines: str) -> dict[str, float]:
    """Run `lines` in a process of its own; its printed peak of memory and seconds."""
    code = (
        textwrap.dedent("""
        import resource, sys, time
        sys.path.insert(0, "tests")
        from support.images import *
        from plait.platform.errors import PlaitError
        from plait.vision.decode import decode_bytes
        from plait.vision.limits import ImageLimits
        limits = ImageLimits()
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        """)
        + textwrap.dedent(lines)
        + "\nprint(peak() - before, time.monotonic() - began)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, seconds = map(float, done.stdout.split())
    unit = 1 if sys.platform == "darwin" else 1024
    return {"mib": grown * unit / (1 << 20), "seconds": seconds}


@pytest.mark.parametrize(
    ("make_data", "refused"),
    [
        ("empty_png(10_000, 5_000)", True),
        ("with_text_bomb(encoded(picture()), 128)", False),
        ("many_scans(encoded(picture(), 'JPEG', progressive=True), 20_000)", True),
    ],
)
async def test_a_bomb_costs_next_to_nothing(make_data, refused):
    cost = run_in_process(f"""
        data = {make_data}
        decode_bytes(encoded(picture()), limits)
        before, began = peak(), time.monotonic()
        try:
            decode_bytes(data, limits)
            refused = False
        except PlaitError:
            refused = True
        assert refused is {refused}
        """)
    assert cost["mib"] < 32
    assert cost["seconds"] < 2


async def test_the_largest_image_takes_no_more_memory_than_is_said():
    cost = run_in_process("""
        data = empty_png(7680, 4320)
        decode_bytes(encoded(picture()), limits)
        before, began = peak(), time.monotonic()
        decode_bytes(data, limits)
        """)
    assert cost["mib"] < 12 * 7680 * 4320 / (1 << 20)


async def test_builders_make_what_they_say():
    assert len(empty_png(1000, 1000)) < 1 << 14
    assert len(with_text_bomb(encoded(picture()), 16)) < 1 << 20


# --- content parts ---


def reader(**options) -> PartReader:
    return PartReader(**{"model": "eyes", "takes_images": True, "max_images": 2, **options})


async def test_parts_are_checked_in_form():
    url = data_url(encoded(picture()))
    read = reader()
    assert read.read({"type": "image_url", "image_url": {"url": url}}, "a") == {"type": "image"}
    more = {"type": "image_url", "image_url": {"url": url, "detail": "low"}, "uuid": "x"}
    assert read.read(more, "b") == {"type": "image"}
    assert [(i.at, i.detail) for i in read.images] == [
        ("a.image_url", "auto"),
        ("b.image_url", "low"),
    ]
    with pytest.raises(BadRequest, match="more than 2 images"):
        read.read(more, "c")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"type": "image_url"}, "must be an object"),
        ({"type": "image_url", "image_url": {}}, "url must be a string"),
        ({"type": "image_url", "image_url": {"url": 3}}, "url must be a string"),
        ({"type": "image_url", "image_url": {"url": "x", "size": 3}}, "size is not known"),
        ({"type": "image_url", "image_url": {"url": "x"}, "extra": 1}, "extra is not known"),
        ({"type": "image_url", "image_url": {"url": "data:,x", "detail": "max"}}, "auto, high"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "file:"),
        ({"type": "image_url", "image_url": {"url": "picture.png"}}, "begins with data:"),
        ({"type": "image", "image": "picture.png"}, "send images as image_url"),
        ({"type": "image_embeds", "image_embeds": ""}, "image_embeds is not served"),
        ({"type": "video_url", "video_url": {}}, "video_url is not served"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio is not served"),
    ],
)
async def test_parts_that_are_wrong_are_refused_with_their_place(given, match):
    with pytest.raises(BadRequest, match=match) as error:
        reader().read(given, "messages[0].content[1]")
    assert error.value.param.startswith("messages[0].content[1]")


async def test_images_stand_in_the_messages_of_users():
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    for role in ("system", "assistant", "tool"):
        with pytest.raises(BadRequest, match=role):
            reader().read(image, "a", role)
