"""What becomes of image files: the right pixels, or a refusal that says why."""

import io
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin
from support import images
from support.images import FORMATS, encoded, picture

from plait.platform.errors import ImageTooLarge, InvalidImage, PlaitError
from plait.vision.decode import DecodedImage, decode_bytes, inspect
from plait.vision.limits import ImageLimits

LIMITS = ImageLimits()
SMALL = ImageLimits(image_pixels=1 << 16, image_side=4096)


def decoded(data: bytes, limits: ImageLimits = LIMITS) -> np.ndarray:
    return decode_bytes(data, limits).pixels


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True, "quality": 95}),
        ("JPEG", {"subsampling": 0, "restart_marker_rows": 1}),
        ("GIF", {}),
        ("GIF", {"interlace": 1}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
    ],
)
@pytest.mark.parametrize("size", [(48, 32), (1, 1), (1, 3000), (3000, 1), (17, 5)])
def test_pixels_are_those_of_pillow(form, options, size):
    data = encoded(picture(*size), form, **options)
    image = decode_bytes(data, LIMITS)
    assert (image.width, image.height) == size
    assert image.pixels.dtype == np.uint8
    assert not image.pixels.flags.writeable
    assert np.array_equal(image.pixels, by_pillow(data))


def test_bands_make_no_seams():
    data = encoded(picture(3000, 800), "JPEG")
    assert np.array_equal(decoded(data), by_pillow(data))


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_grey_and_palettes_become_rgb(mode):
    data = encoded(picture().convert(mode))
    assert np.array_equal(decoded(data), by_pillow(data))


def test_16_bits_keep_their_upper_half():
    values = np.array([[0, 255, 256, 0x8000, 0xFFFF]], ">u2")
    data = images.png(images.header(5, 1, 16, 0), images.png_rows(values.view(np.uint8)))
    assert decoded(data)[0, :, 0].tolist() == [0, 0, 1, 0x80, 0xFF]
    colour = np.array([[[0x1234, 0x5678, 0xFFFF]]], ">u2")
    rows = colour.reshape(1, -1).view(np.uint8)
    data = images.png(images.header(1, 1, 16, 2), images.png_rows(rows))
    assert decoded(data).tolist() == [[[0x12, 0x56, 0xFF]]]


def test_transparency_is_laid_on_white():
    pixels = np.array([[[10, 20, 30, 0], [10, 20, 30, 255], [0, 0, 0, 128]]], np.uint8)
    for form, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        data = encoded(Image.fromarray(pixels), form, **options)
        assert decoded(data)[0].tolist() == [[255] * 3, [10, 20, 30], [127] * 3]


def test_transparency_of_palettes_and_grey_with_alpha():
    shown = Image.new("P", (2, 1))
    shown.putpalette([200, 0, 0, 0, 0, 200])
    shown.putpixel((1, 0), 1)
    for key in (0, b"\0\xff"):
        assert decoded(encoded(shown, transparency=key)).tolist() == [[[255] * 3, [0, 0, 200]]]
    assert decoded(encoded(shown, "GIF", transparency=0)).tolist() == [[[255] * 3, [0, 0, 200]]]
    grey = Image.new("LA", (1, 1), (40, 0))
    assert decoded(encoded(grey)).tolist() == [[[255] * 3]]


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_a_transparent_colour_is_found_in_the_bits_of_its_file(depth):
    top = (1 << depth) - 1
    packed = np.array([[(top << (8 - depth)) if depth < 8 else top]], np.uint8)  # one bright pixel
    for key, pixel in ((top, 255), (0, 255)):
        data = images.png(
            images.header(1, 1, depth, 0),
            images.chunk(b"tRNS", struct.pack(">H", key)),
            images.png_rows(packed),
        )
        assert decoded(data)[0, 0, 0] == pixel
    dark = images.png(
        images.header(1, 1, depth, 0),
        images.chunk(b"tRNS", struct.pack(">H", 0)),
        images.png_rows(np.zeros((1, 1), np.uint8)),
    )
    assert decoded(dark)[0, 0, 0] == 255  # black, and transparent


def test_a_transparent_colour_of_rgb():
    rows = np.array([[1, 2, 3, 4, 5, 6]], np.uint8)
    key = images.chunk(b"tRNS", struct.pack(">HHH", 4, 5, 6))
    data = images.png(images.header(2, 1), key, images.png_rows(rows))
    assert decoded(data).tolist() == [[[1, 2, 3], [255, 255, 255]]]
    deep = np.zeros((1, 6), np.uint8)
    data = images.png(images.header(1, 1, 16, 2), key, images.png_rows(deep))
    with pytest.raises(InvalidImage, match="alpha channel"):
        decoded(data)


def test_cmyk_and_ycck():
    data = encoded(picture().convert("CMYK"), "JPEG", quality=95)
    assert np.array_equal(decoded(data), by_pillow(data))
    assert np.abs(decoded(data).astype(int) - np.asarray(picture())).mean() < 8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_is_applied(orientation, form, order):
    block = images.exif(orientation, order)
    data = encoded(picture(40, 24), form, exif=block)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(decoded(data), np.asarray(upright))


@pytest.mark.parametrize(
    "block",
    [
        images.exif(9),
        images.exif(0),
        b"Exif\0\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 40,
    ],
)
def test_a_broken_exif_block_is_passed_over(block):
    data = encoded(picture(40, 24), "JPEG", exif=block)
    assert np.array_equal(decoded(data), decoded(encoded(picture(40, 24), "JPEG")))


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_animations_the_first_frame_is_taken(form):
    frames = [picture(seed=0), picture(seed=1).rotate(180), picture(seed=2)]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(decoded(data), by_pillow(encoded(frames[0], form, **options)))


def test_a_first_frame_that_covers_a_part_stands_on_white():
    frame = Image.new("P", (3, 2), 1)
    frame.putpalette([0, 0, 0, 9, 99, 199])
    whole = decoded(images.gif_frame((8, 6), (4, 3, 3, 2), frame))
    assert whole.shape == (6, 8, 3)
    assert whole[3:5, 4:7].reshape(-1, 3).tolist() == [[9, 99, 199]] * 6
    assert int((whole == 255).all(axis=2).sum()) == 48 - 6
    beyond = decoded(images.gif_frame((5, 4), (4, 3, 3, 2), frame))
    assert beyond.shape == (4, 5, 3)
    assert beyond[3, 4].tolist() == [9, 99, 199]


def test_what_decides_no_pixel_changes_none_and_is_not_read():
    plain = encoded(picture())
    notes = PngImagePlugin.PngInfo()
    notes.add_text("workflow", "x" * (3 << 20), zip=True)
    noted = encoded(picture(), pnginfo=notes, icc_profile=b"no profile")
    assert np.array_equal(decoded(noted), decoded(plain))
    jpeg = encoded(picture(), "JPEG")
    photo = encoded(picture(), "JPEG", comment=b"c" * 60_000, icc_profile=b"p" * 200_000)
    assert np.array_equal(decoded(photo + b"\0\0\0\x18ftypmp42" + b"v" * 999), decoded(jpeg))


def test_digests_tell_content_apart():
    first, again, other = (decode_bytes(encoded(picture(seed=s)), LIMITS) for s in (0, 0, 1))
    assert first.digest == again.digest != other.digest
    assert len(first.digest) == 64
    # Equal pixels, another file: another digest, as nothing is decoded to find out.
    assert decode_bytes(encoded(picture(), compress_level=1), LIMITS).digest != first.digest


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_is_cut_is_refused_wherever_it_is_cut(form):
    options = {"progressive": True} if form == "JPEG" else {}
    data = encoded(picture(160, 120), form, **options)
    whole = decoded(data)
    cuts = {*range(64), *range(len(data) - 16, len(data)), *range(64, len(data), 97)}
    for cut in sorted(cuts):
        try:
            pixels = decoded(data[:cut])
        except InvalidImage:
            continue
        assert np.array_equal(pixels, whole), f"cut at {cut}"


def test_a_plain_jpeg_without_its_end_is_refused():
    data = encoded(picture(160, 120), "JPEG")
    for cut in (2, 3, len(data) // 3, len(data) // 2):
        with pytest.raises(InvalidImage, match="cut short"):
            decoded(data[:-cut])


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (encoded(picture(), "TIFF"), "TIFF"),
        (encoded(picture(), "BMP"), "BMP"),
        (encoded(picture(), "JPEG2000"), "JPEG 2000"),
        (encoded(picture(), "AVIF"), "AVIF"),
        (encoded(picture(), "ICO"), "ICO"),
        (encoded(picture(), "PDF"), "PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "video"),
        (b"\x1a\x45\xdf\xa3" + b"\0" * 40, "video"),
        (b"RIFF\0\0\0\0AVI LIST", "AVI"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"<?xml version='1.0'?><svg/>", "SVG"),
        (b"<!DOCTYPE html><title>404</title>", "HTML"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "PostScript"),
        (b"P6 1 1 255 abc", "no known format"),
        (b"", "empty"),
        (b"\x89PN", "no known format"),
    ],
)
def test_other_formats_are_refused_by_name(data, name):
    with pytest.raises(InvalidImage, match=name) as error:
        decoded(data)
    assert "PNG, JPEG, WebP or GIF" in error.value.message


def huge(form: str, width: int, height: int) -> bytes:
    """A small valid file that says it is huge."""
    data = bytearray(encoded(picture(), form))
    if form == "PNG":
        return bytes(data[:8]) + images.header(width, height) + bytes(data[33:])
    if form == "GIF":
        data[6:10] = struct.pack("<HH", min(width, 65535), min(height, 65535))
    elif form == "JPEG":
        at = data.index(b"\xff\xc0")
        data[at + 5 : at + 9] = struct.pack(">HH", min(height, 65535), min(width, 65535))
    else:
        at = data.index(b"\x9d\x01\x2a") + 3
        data[at : at + 4] = struct.pack("<HH", min(width, 16383), min(height, 16383))
    return bytes(data)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [(10_000, 5_000), (16_000, 16_000), (2**31 - 1, 2**31 - 1)])
def test_huge_sizes_are_refused_by_the_header(form, size):
    with pytest.raises(ImageTooLarge, match="pixels"):
        inspect(huge(form, *size), LIMITS)


def test_a_gif_frame_larger_than_its_canvas_is_held_to_the_bound():
    data = bytearray(encoded(picture(), "GIF"))
    at = data.rindex(b"\x2c" + struct.pack("<HHHH", 0, 0, 48, 32))
    data[at + 5 : at + 9] = struct.pack("<HH", 60_000, 60_000)
    with pytest.raises(ImageTooLarge):
        decoded(bytes(data))


def test_sides_and_bytes_have_bounds_of_their_own():
    with pytest.raises(ImageTooLarge, match="side"):
        inspect(huge("PNG", 40_000, 1), LIMITS)
    with pytest.raises(ImageTooLarge, match="max-image-bytes"):
        inspect(encoded(picture()), ImageLimits(image_bytes=100))
    with pytest.raises(InvalidImage, match="no pixels"):
        inspect(huge("PNG", 0, 7), LIMITS)


def test_a_jpeg_of_thousands_of_scans_is_refused():
    data = encoded(picture(), "JPEG", progressive=True)
    with pytest.raises(InvalidImage, match="scans"):
        decoded(images.many_scans(data, 3000))


def test_a_gif_of_endless_parts_is_refused():
    data = encoded(picture(), "GIF")
    noise = b"\x21\xfe" + b"\x01c" * 300_000 + b"\0"
    at = 13 + (3 << ((data[10] & 7) + 1))
    with pytest.raises(InvalidImage, match="parts"):
        decoded(data[:at] + noise + data[at:])


def test_a_part_of_a_png_that_does_not_match_its_checksum_is_refused():
    data = bytearray(encoded(picture()))
    at = data.index(b"IDAT") + 20
    data[at] ^= 1
    with pytest.raises(InvalidImage, match="checksum"):
        decoded(bytes(data))


def test_errors_hold_nothing_of_this_machine():
    rng = random.Random(0)
    for form in FORMATS:
        data = bytearray(encoded(picture(), form))
        for _ in range(40):
            broken = bytearray(data)
            for at in rng.sample(range(12, len(data)), 6):
                broken[at] = rng.randrange(256)
            try:
                decoded(bytes(broken), SMALL)
            except PlaitError as error:
                text = error.message
                assert "/" not in text
                assert "0x" not in text
                assert "PIL" not in text


@st.composite
def mutated(draw):
    """A valid file with bytes changed, cut out, doubled or put in."""
    form = draw(st.sampled_from(FORMATS))
    options = {"progressive": True} if form == "JPEG" and draw(st.booleans()) else {}
    if form in ("GIF", "WEBP") and draw(st.booleans()):
        options = {"save_all": True, "append_images": [picture(20, 12, 1)]}
    data = bytearray(encoded(picture(20, 12), form, **options))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 8))
        kind = draw(st.sampled_from("xcdi"))
        if kind == "c":
            del data[at : at + length]
        elif kind == "d":
            data[at:at] = data[at : at + length]
        else:
            new = draw(st.binary(min_size=length, max_size=length))
            data[at : at + (length if kind == "x" else 0)] = new
    # Else nothing that changed would come as far as the decoder.
    return images.with_checksums(bytes(data)) if form == "PNG" else bytes(data)


@given(mutated() | st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_an_image_or_an_error_of_ours(data):
    try:
        image = decode_bytes(data, SMALL)
    except InvalidImage:
        return
    assert isinstance(image, DecodedImage)
    assert image.pixels.shape == (image.height, image.width, 3)
    assert image.width * image.height <= SMALL.image_pixels
