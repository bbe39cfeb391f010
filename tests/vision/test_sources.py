"""What may be written where an image is wanted."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from support.images import data_url, encoded, exif, picture

from plait.platform.errors import BadRequest, ImageTooLarge, InvalidImage, PlaitError, Unsupported
from plait.vision.limits import ImageLimits
from plait.vision.parts import PartReader
from plait.vision.preparation import ImagePreparation
from plait.vision.sources import DataUrl, WebUrl, read_data_url, read_url

LIMITS = ImageLimits()
PNG = encoded(picture(4, 3))


def bytes_of(url: str, limits: ImageLimits = LIMITS) -> bytes:
    source = read_url(url)
    assert isinstance(source, DataUrl)
    return read_data_url(source, limits)


@pytest.mark.parametrize(
    "url",
    [
        data_url(PNG),
        "DATA:Image/PNG;charset=x;Base64," + base64.b64encode(PNG).decode(),
        "data:;base64," + base64.b64encode(PNG).decode(),
        "data:video/jpeg;base64," + base64.b64encode(PNG).decode(),  # the type is not believed
        "data:image/png;base64," + base64.b64encode(PNG).decode().replace("=", "%3D"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
    ],
)
def test_data_urls_are_read_in_every_spelling(url):
    assert bytes_of(url) == PNG


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,AAA", "base64"),
        ("data:image/png;base64,AA-_", "base64url"),
        ("data:image/png;base64,AAAA\nAAAA", "line breaks"),
        ("data:image/png;base64,AA==AAAA", "base64"),
        ("data:image/png;base64,AAAÄ", "ASCII"),
        ("data:image/png,%", "two hexadecimal digits"),
        ("data:image/png,%4", "two hexadecimal digits"),
        ("data:image/png,%4g", "two hexadecimal digits"),
        ("data:image/png;base64,%%41", "two hexadecimal digits"),
    ],
)
def test_broken_data_urls_are_refused(url, match):
    with pytest.raises(InvalidImage, match=match):
        bytes_of(url)


def test_escapes_are_read_wherever_pieces_end(monkeypatch):
    monkeypatch.setattr("plait.vision.sources._PIECE", 7)
    data = bytes(range(256))
    for shift in range(7):
        text = "x" * shift + "".join(f"%{b:02X}" if b % 3 or b > 90 else chr(b) for b in data)
        assert bytes_of("data:," + text) == b"x" * shift + data


def test_the_size_of_a_data_url_is_bounded_before_it_is_decoded():
    small = ImageLimits(image_bytes=1000)
    for payload in ("!" * 1400, "%41" * 4000):  # no base64: it was not looked at
        with pytest.raises(ImageTooLarge, match="1000 bytes"):
            bytes_of("data:;base64," + payload, small)
    with pytest.raises(ImageTooLarge):
        bytes_of("data:," + "%41" * 1200, small)
    assert len(bytes_of(data_url(b"x" * 1000), small)) == 1000


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://host/a.png", "gopher://x", "javascript:1", "FILE:x"]
)
def test_other_schemes_are_refused_by_name(url):
    with pytest.raises(Unsupported, match=url.partition(":")[0].lower()):
        read_url(url)
    with pytest.raises(BadRequest, match="begins with data:"):
        read_url("//host/a.png")


def test_what_is_handed_over_in_this_process_becomes_the_same_pixels(tmp_path):
    image = picture(30, 20)
    path = tmp_path / "image.png"
    image.save(path)
    array = np.asarray(image)
    values = [image, path, str(path), path.read_bytes(), data_url(path.read_bytes()), array]
    reader = PartReader(model="m", takes_images=True, max_images=9, is_local=True)
    for i, value in enumerate(values):
        kind = ("image", "image_pil")[i % 2]
        assert reader.read({"type": kind, kind: value}, f"[{i}]") == {"type": "image"}
    preparation = ImagePreparation()
    try:
        images = preparation.prepare_blocking(reader.images)
    finally:
        preparation.close()
    assert all(np.array_equal(one.pixels, array) for one in images)
    # Files have one digest, pixels another; neither depends on how they came here.
    assert images[0].digest == images[5].digest != images[1].digest
    assert images[1].digest == images[2].digest == images[3].digest == images[4].digest


def test_a_pil_image_is_turned_as_its_file_would_be():
    data = encoded(picture(30, 20), "JPEG", exif=exif(6))
    preparation = ImagePreparation()
    reader = PartReader(model="m", takes_images=True, max_images=2, is_local=True)
    for value in (data, Image.open(io.BytesIO(data))):
        reader.read({"type": "image", "image": value}, "x")
    from_file, from_pil = preparation.prepare_blocking(reader.images)
    preparation.close()
    assert from_file.pixels.shape == (30, 20, 3)
    assert np.array_equal(from_file.pixels, from_pil.pixels)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros((2, 2)), r"uint8 \[H, W, 3\]"),
        (np.zeros((2, 2, 4), np.uint8), r"\[2, 2, 4\]"),
        (np.zeros((0, 2, 3), np.uint8), "no pixels"),
        (Image.new("F", (2, 2)), "mode F"),
        (Image.new("I", (2, 2)), "mode I"),
        ("no/such/file.png", "cannot be read"),
        ("file:///etc/passwd", "by its path, without file:"),
        ("HTTPS://example.com/a.png", "nothing is fetched.*its path"),
        (b"no image", "no known format"),
        (7, "int"),
    ],
)
def test_what_is_no_image_is_refused(value, match):
    reader = PartReader(model="m", takes_images=True, max_images=2, is_local=True)
    preparation = ImagePreparation()
    try:
        with pytest.raises(PlaitError, match=match) as error:  # noqa: PT012 (either of them)
            reader.read({"type": "image", "image": value}, "messages[0].content[1]")
            preparation.prepare_blocking(reader.images)
    finally:
        preparation.close()
    assert error.value.param.startswith("messages[0].content[1]")
    assert error.value.status == 400


def test_web_addresses_are_only_noted():
    assert read_url("https://example.com/a.png") == WebUrl(url="https://example.com/a.png")
