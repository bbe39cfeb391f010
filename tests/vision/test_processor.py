"""Prompts with images, against transformers' own processors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from support.images import picture
from support.tiny_processors import SPECS, make_processor_files, oracle_inputs, vision_info

from plait.platform.config import Options
from plait.platform.errors import (
    BadRequest,
    ContextLengthExceeded,
    ImageTooLarge,
    InvalidImage,
    ModelUnsupported,
)
from plait.platform.model.families import FAMILIES as FAMILIES_OF_MODELS
from plait.platform.model.families import family_of
from plait.platform.text.tokenizer import Tokenizer
from plait.vision.decode import DecodedImage
from plait.vision.early import check_family
from plait.vision.limits import ImageLimits
from plait.vision.placing import PlacedImages
from plait.vision.processor import ImageProcessor
from plait.vision.recipes import NEEDS_TORCHVISION, RECIPES
from plait.vision.sources import ImagePixels, read_pixels

SIZES = ((48, 32), (16, 16), (21, 70), (90, 33))
FAMILIES = tuple(SPECS)


@cache
def loaded(family: str, root: Path) -> tuple[ImageProcessor, Tokenizer]:
    make_processor_files(family, root / family)
    tokenizer = Tokenizer.load(root / family)
    return ImageProcessor.load(root / family, tokenizer, vision_info(family, tokenizer)), tokenizer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processors")


def decoded(image: Image.Image) -> DecodedImage:
    return read_pixels(ImagePixels(value=image), ImageLimits())


def chat(*parts: Any) -> list[dict[str, Any]]:
    """One turn; numbers are images."""
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts
    ]
    return [{"role": "user", "content": content}]


def encoded(
    processor: ImageProcessor, tokenizer: Tokenizer, text: str, images: list[Image.Image]
) -> tuple[list[int], PlacedImages]:
    made = processor.process_blocking([decoded(image) for image in images])
    return processor.encode(text, made, lambda t: tokenizer.encode(t, add_special_tokens=False))


LAYOUTS = {
    "one in the middle": chat("Look: ", 0, "\n\nWhat is it?"),
    "several, first and last": [
        *chat(0, "\nthis, ", 1, " that"),
        {"role": "assistant", "content": "My cat."},
        *chat("and ", 2),
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_what_transformers_makes_of_it(family: str, layout: str, root: Path) -> None:
    processor, tokenizer = loaded(family, root)
    messages = LAYOUTS[layout]
    if family == "paligemma":
        messages = messages[:1]
    text = tokenizer.render_chat(messages)
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES)]
    images = images[: text.count(processor.placeholder)]
    wanted = oracle_inputs(family, text, images)

    processed = processor.process_blocking([decoded(image) for image in images])
    ids, placed = processor.encode(
        text, processed, lambda t: tokenizer.encode(t, add_special_tokens=False)
    )

    assert ids == wanted["input_ids"][0].tolist()
    token = processor.vision.image_token_id
    marked = [
        i.start + at + n for i in placed.items for at, length in i.embedded for n in range(length)
    ]
    assert marked == np.flatnonzero(np.array(ids) == token).tolist()
    assert placed.num_tokens == len(marked)
    for item, count in zip(placed.items, processed, strict=True):
        assert item.num_tokens == sum(item.embedded[-1])
        assert item.num_embeds == count.num_embeds
    assert_tensors_equal(family, placed.items, wanted)


def assert_tensors_equal(family: str, items: Any, wanted: dict[str, Any]) -> None:
    for name in items[0].tensors:
        parts = [np.frombuffer(i.tensors[name].data, i.tensors[name].dtype) for i in items]
        parts = [p.reshape(i.tensors[name].shape) for p, i in zip(parts, items, strict=True)]
        whole = np.asarray(wanted[name])
        if family in ("idefics3", "smolvlm"):
            whole = whole[0]
        if whole.ndim == parts[0].ndim + 1:  # an entry for each image, padded to the largest
            for part, row in zip(parts, whole, strict=True):
                assert np.array_equal(part, row[: len(part)])
                assert not row[len(part) :].any()
            continue
        if family in ("llava_pixtral", "mistral3") and name == "pixel_values":
            for part, row in zip(parts, whole, strict=True):
                assert np.array_equal(part[0], row[:, : part.shape[2], : part.shape[3]])
            continue
        assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_by_size_are_the_processors_own(family: str, root: Path) -> None:
    processor, _ = loaded(family, root)
    for size in SIZES:
        (made,) = processor.process_blocking([decoded(picture(*size))])
        assert 0 < made.num_embeds <= processor.count(size[1], size[0]) <= made.num_embeds + 40
        # Where a channel's number could be a side's.
        for thin in ((24, 1), (24, 3), (3, 3), (1, 1)):
            (small,) = processor.process_blocking([decoded(picture(*thin))])
            assert small.num_embeds <= processor.count(thin[1], thin[0]) <= small.num_embeds + 40
        pair = processor.process_blocking([decoded(picture(*size)), decoded(picture(8, 8))])
        if family == "llava_onevision":
            assert processor.count(size[1], size[0], alone=False) == pair[0].num_embeds


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_images_are_taken_and_too_thin_ones_refused_by_number(family: str, root: Path) -> None:
    processor, _ = loaded(family, root)
    for size in ((1, 1), (3, 1), (1, 3), (3, 3), (1, 150)):
        if max(size) > 100 and SPECS[family].processor == "PixtralProcessor":
            continue  # its shorter side becomes nothing
        (made,) = processor.process_blocking([decoded(picture(*size))])
        assert made.num_embeds
    with pytest.raises(InvalidImage, match=r"image 2: .* 1 × 201: its sides are too"):
        processor.process_blocking([decoded(picture(8, 8)), decoded(picture(1, 201))])


@pytest.mark.parametrize("family", [f for f in FAMILIES if SPECS[f].info.get("has_grid_positions")])
def test_positions_are_those_of_the_models_own_rope_index(family: str, root: Path) -> None:
    processor, tokenizer = loaded(family, root)
    text = tokenizer.render_chat(LAYOUTS["several, first and last"])
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES[:3])]
    ids, placed = encoded(processor, tokenizer, text, images)

    made = oracle_inputs(family, text, images)
    model_class = getattr(transformers, SPECS[family].processor.removesuffix("Processor") + "Model")
    merge = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=merge))
    model.get_vision_position_ids = partial(model_class.get_vision_position_ids, model)
    of_images = torch.tensor(ids)[None] == processor.vision.image_token_id
    rows, delta = model_class.get_rope_index(
        model,
        torch.tensor(ids)[None],
        of_images.int(),
        image_grid_thw=torch.from_numpy(made["image_grid_thw"]),
    )
    assert placed.positions == rows[:, 0].int().numpy().tobytes()
    assert placed.position_delta == delta.item()


def test_gemma_3_spans_are_its_runs_of_image_tokens(root: Path) -> None:
    processor, tokenizer = loaded("gemma3", root)
    text = tokenizer.render_chat(LAYOUTS["several, first and last"])
    images = [picture(*size, seed=i) for i, size in enumerate(SIZES[:3])]
    _, placed = encoded(processor, tokenizer, text, images)
    types = oracle_inputs("gemma3", text, images)["token_type_ids"][0]
    edges = np.flatnonzero(np.diff(types, prepend=0, append=0)).reshape(-1, 2)
    assert placed.spans == tuple((int(a), int(b)) for a, b in edges)
    assert len(placed.spans) == 3
    assert placed.vision_digest == ""


def test_paligemma_sees_its_whole_prompt_and_keys_it(root: Path) -> None:
    processor, tokenizer = loaded("paligemma", root)
    one = [picture(20, 20)]
    ids, placed = encoded(processor, tokenizer, "<image>caption", one)
    assert placed.spans == ((0, len(ids)),)
    _, again = encoded(processor, tokenizer, "<image>caption", one)
    _, other_text = encoded(processor, tokenizer, "<image>captiom", one)
    _, other_image = encoded(processor, tokenizer, "<image>caption", [picture(20, 20, seed=1)])
    digests = [p.vision_digest for p in (placed, again, other_text, other_image)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_keys_follow_content_and_settings_alone(root: Path, tmp_path: Path) -> None:
    processor, _ = loaded("qwen2_vl", root)
    first, other = decoded(picture(40, 40)), decoded(picture(40, 40, seed=1))
    (alone,) = processor.process_blocking([first])
    keys = [made.key for made in processor.process_blocking([other, first, other])]
    assert keys[1] == alone.key
    assert keys[0] == keys[2] != keys[1]
    for name, settings in {"same": {}, "finer": {"size": _FINER}}.items():
        make_processor_files("qwen2_vl", tmp_path / name)
        changed = tmp_path / name / "preprocessor_config.json"
        changed.write_text(json.dumps(json.loads(changed.read_text()) | settings))
        tokenizer = Tokenizer.load(tmp_path / name)
        again = ImageProcessor.load(tmp_path / name, tokenizer, vision_info("qwen2_vl", tokenizer))
        assert (again.process_blocking([first])[0].key == alone.key) == (name == "same")


_FINER = {"shortest_edge": 64, "longest_edge": 2048}


def test_an_image_beside_others_is_another_one_where_only_a_lone_one_is_tiled(root: Path) -> None:
    processor, _ = loaded("llava_onevision", root)
    image = decoded(picture(30, 20))
    (alone,) = processor.process_blocking([image])
    first, second = processor.process_blocking([image, image])
    assert first.key == second.key != alone.key
    assert alone.tensors["pixel_values"].shape[0] > 1 == first.tensors["pixel_values"].shape[0]


@pytest.mark.anyio
async def test_an_image_is_processed_once_for_all_who_ask(root: Path) -> None:
    processor, _ = loaded("llava", root)
    image = decoded(picture(77, 55))
    asked = [processor.process([image, image]) for _ in range(4)]
    made = [one for row in await asyncio.gather(*asked) for one in row]
    assert len({id(one) for one in made}) == 1
    (again,), (apart,) = await processor.process([image]), await processor.process([image], "salt")
    assert again is made[0]
    assert apart is not again
    assert apart == again


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "internvl"])
def test_names_of_image_tokens_in_text_are_refused(family: str, root: Path) -> None:
    processor, tokenizer = loaded(family, root)
    for name in (SPECS[family].embedded, processor.placeholder):
        messages = chat("a", 0, f"b {name}")
        with pytest.raises(BadRequest, match="stands for an image") as caught:
            processor.check_text(messages)
        assert caught.value.param == "messages[0].content[2].text"
        text = tokenizer.render_chat(messages)
        with pytest.raises(BadRequest):
            encoded(processor, tokenizer, text, [picture(20, 20)])
        # Halves that the template joins.
        halves = chat(0, name[:4], name[4:])
        processor.check_text(halves)
        with pytest.raises(BadRequest):
            encoded(processor, tokenizer, tokenizer.render_chat(halves), [picture(20, 20)])
    processor.check_text(chat("a < b and <|im_start|>"))


def test_more_tokens_than_there_is_room_for_are_told_before_pixels_are_looked_at(
    root: Path,
) -> None:
    processor, _ = loaded("qwen2_vl", root)
    images = [decoded(picture(16, 16)), decoded(picture(64, 64))]
    processor.check_room(images, 68)
    with pytest.raises(ContextLengthExceeded, match=r"68 tokens.* 67: image 2 takes 64 \(64 × 64"):
        processor.check_room(images, 67)


def test_what_cannot_be_processed_is_refused_by_family_at_load(root: Path, tmp_path: Path) -> None:
    _, tokenizer = loaded("qwen2_vl", root)
    info = vision_info("qwen2_vl", tokenizer)
    for family in NEEDS_TORCHVISION:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        with pytest.raises(ModelUnsupported, match=rf"images of {family} are not served: no proc"):
            ImageProcessor.load(tmp_path, tokenizer, replace(info, family=family))
        with pytest.raises(ModelUnsupported, match=rf"images of {family} are not served.*torchvis"):
            check_family(Options(model=str(tmp_path)))
        check_family(Options(model=str(tmp_path), encoder_cache_bytes=0))
    check_family(Options(model=str(root / "qwen2_vl")))
    check_family(Options(model=str(tmp_path / "not there")))
    with pytest.raises(ModelUnsupported, match="and the model wants token 70"):
        ImageProcessor.load(root / "qwen2_vl", tokenizer, replace(info, image_token_id=70))
    make_processor_files("llava", tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen2VLProcessor"}')
    with pytest.raises(ModelUnsupported, match="of llava are not served with a Qwen2VLProcessor"):
        ImageProcessor.load(tmp_path, tokenizer, vision_info("llava", tokenizer))
    (tmp_path / "processor_config.json").unlink()  # no patch size, here or in the config
    with pytest.raises(ModelUnsupported, match="images of llava are not served: its processor"):
        ImageProcessor.load(tmp_path, tokenizer, vision_info("llava", tokenizer))
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelUnsupported, match="has no image processor that can be used"):
        ImageProcessor.load(tmp_path, tokenizer, vision_info("llava", tokenizer))


def test_the_models_take_the_tensors_that_recipes_make() -> None:
    for family, recipe in RECIPES.items():
        assert FAMILIES_OF_MODELS[family].tensors == recipe.tensors
    pixtral = family_of("llava", "pixtral")
    assert pixtral is not None
    assert pixtral.tensors == RECIPES["mistral3"].tensors
    assert FAMILIES_OF_MODELS.keys() == RECIPES.keys() | set(NEEDS_TORCHVISION)


def test_templates_that_read_strings_alone_get_placeholders(root: Path) -> None:
    processor, tokenizer = loaded("llava", root)
    plain = tokenizer.with_chat_template(
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    )
    messages = [*chat(0, "What is it?"), {"role": "assistant", "content": "My cat."}]
    assert plain.render_chat(processor.shown(messages, plain.chat_template_for())) == (
        "USER: <image>\nWhat is it?\nASSISTANT: My cat.\n"
    )
    assert processor.shown(messages, tokenizer.chat_template_for()) == messages


def test_paligemma_is_asked_without_a_template_of_its_own(root: Path, tmp_path: Path) -> None:
    processor, _ = loaded("paligemma", root)
    make_processor_files("paligemma", tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(tmp_path)
    text = tokenizer.render_chat(chat("caption en", 0))
    assert text == "<image>caption en"
    with pytest.raises(BadRequest, match="one message"):
        tokenizer.render_chat([*chat("a", 0), *chat("b")])
    with pytest.raises(BadRequest, match="answers questions about images"):
        encoded(processor, tokenizer, tokenizer.render_chat(chat("a")), [])


def test_images_that_would_fill_the_memory_are_refused_by_their_size(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, _ = loaded("qwen2_vl", root)
    image = decoded(picture(64, 64))
    num_bytes = processor.process_blocking([image])[0].num_bytes
    monkeypatch.setattr("plait.vision.processing.PROCESSED_BYTES", 2.2 * num_bytes)
    processor.check_room([image] * 2, 1000)
    with pytest.raises(ImageTooLarge, match="as the model reads them"):
        processor.check_room([image] * 3, 1000)
