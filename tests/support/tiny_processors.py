"""Tiny image processors, tokenizers and chat templates of the vision-language families.

Each checkpoint directory has what a hub's has beside its weights. `oracle` is transformers' own
processor over the same settings, with its own tokenizer.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from PIL import Image
from support.tiny_tokenizers import byte_level_backend

from plait.platform.config import VisionInfo
from plait.platform.text.tokenizer import Tokenizer

_CHAT = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{% if m.content is string %}}"
    "{{{{ m.content }}}}{{% else %}}{{% for p in m.content %}}{{% if p.type == 'image' %}}{image}"
    "{{% else %}}{{{{ p.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
_BARE = (
    "{% for p in messages[0].content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}"
)
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_SQUARE = {"height": 16, "width": 16}
_AREA = {"shortest_edge": 64, "longest_edge": 4096}
_PATCHES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": _AREA}
_LLAVA = {
    "patch_size": 4,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_CONTEXT = "<IMG_CONTEXT>"
_TILES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One family's processor."""

    model_type: str
    processor: str  # as checkpoints name it
    images: str  # class of the image processor
    settings: dict[str, Any]  # of it
    options: dict[str, Any] = field(default_factory=dict)  # of the processor
    image: str = "<image>"  # what the template writes
    embedded: str = "<image>"  # what takes embeddings
    named: dict[str, str] = field(default_factory=dict)  # tokens with names
    vision: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


def _qwen(model_type: str, processor: str, **more: Any) -> Spec:
    defaults: dict[str, Any] = {
        "images": "Qwen2VLImageProcessorPil",
        "settings": _PATCHES,
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "embedded": "<|image_pad|>",
        "info": {"has_grid_positions": True},
    }
    return Spec(model_type=model_type, processor=processor, **(defaults | more))


def _pixtral(model_type: str, merge: int) -> Spec:
    return Spec(
        model_type=model_type, processor="PixtralProcessor", images="PixtralImageProcessorPil",
        settings={"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        options={"patch_size": 4, "spatial_merge_size": merge}, image="[IMG]", embedded="[IMG]",
        vision={"model_type": "pixtral"},
    )  # fmt: skip


SPECS: dict[str, Spec] = {
    "llava": Spec(
        model_type="llava", processor="LlavaProcessor", images="CLIPImageProcessorPil",
        settings={"size": {"shortest_edge": 16}, "crop_size": _SQUARE}, options=_LLAVA,
    ),
    "llava_pixtral": _pixtral("llava", 1),
    "mistral3": _pixtral("mistral3", 2),
    "llava_next": Spec(
        model_type="llava_next", processor="LlavaNextProcessor",
        images="LlavaNextImageProcessorPil",
        settings={"size": {"shortest_edge": 16}, "crop_size": _SQUARE,
                  "image_grid_pinpoints": _PINPOINTS},
        options=_LLAVA,
    ),
    "llava_onevision": Spec(
        model_type="llava_onevision", processor="LlavaOnevisionProcessor",
        images="LlavaOnevisionImageProcessorPil",
        settings={"size": _SQUARE, "image_grid_pinpoints": _PINPOINTS},
        options={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen("qwen3_vl", "Qwen3VLProcessor"),
    "glm4v": _qwen(
        "glm4v", "Glm4vProcessor", images="Glm4vImageProcessorPil",
        image="<|begin_of_image|><|image|><|end_of_image|>", embedded="<|image|>",
    ),
    "glm4v_moe": _qwen(
        "glm4v_moe", "Glm4vProcessor", images="Glm4vImageProcessorPil",
        image="<|begin_of_image|><|image|><|end_of_image|>", embedded="<|image|>",
    ),
    "glm46v": _qwen(
        "glm46v", "Glm46VProcessor", images="Glm46VImageProcessorPil",
        image="<|begin_of_image|><|image|><|end_of_image|>", embedded="<|image|>",
    ),
    "aya_vision": Spec(
        model_type="aya_vision", processor="AyaVisionProcessor", images="GotOcr2ImageProcessorPil",
        settings={"size": _SQUARE, "min_patches": 1, "max_patches": 6, "crop_to_patches": True},
        options={"patch_size": 4, "img_size": 16, "downsample_factor": 2},
        embedded="<|IMG_PATCH|>",
    ),
    "gemma3": Spec(
        model_type="gemma3", processor="Gemma3Processor", images="Gemma3ImageProcessorPil",
        settings={"size": {"height": 32, "width": 32}}, options={"image_seq_length": 16},
        image="<start_of_image>", embedded="<image_soft_token>",
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
               "image_token": "<image_soft_token>"},
        info={"bidirectional": "image"},
    ),
    "paligemma": Spec(
        model_type="paligemma", processor="PaliGemmaProcessor", images="SiglipImageProcessorPil",
        settings={"size": _SQUARE, "image_seq_length": 16}, info={"bidirectional": "prefix"},
    ),
    "idefics3": Spec(
        model_type="idefics3", processor="Idefics3Processor", images="Idefics3ImageProcessorPil",
        settings=_TILES, options={"image_seq_len": 4},
    ),
    "smolvlm": Spec(
        model_type="smolvlm", processor="SmolVLMProcessor", images="SmolVLMImageProcessorPil",
        settings=_TILES, options={"image_seq_len": 4},
    ),
    "internvl": Spec(
        model_type="internvl", processor="InternVLProcessor", images="GotOcr2ImageProcessorPil",
        settings={"size": _SQUARE, "min_patches": 1, "max_patches": 6},
        options={"image_seq_length": 4}, image=_CONTEXT, embedded=_CONTEXT,
        named={"start_image_token": "<img>", "end_image_token": "</img>",
               "context_image_token": _CONTEXT, "video_token": "<video>"},
    ),
}  # fmt: skip

_SPECIAL = [
    "<image>", "<video>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|im_start|>", "<|vision_start|>",
    "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "<|begin_of_image|>", "<|image|>",
    "<|end_of_image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>", "<start_of_image>",
    "<image_soft_token>", "<end_of_image>", "<fake_token_around_image>", "<global-img>",
    "<end_of_utterance>", "<img>", "</img>", _CONTEXT,
    "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
    *(f"<loc{i:0>4}>" for i in range(1024)), *(f"<seg{i:0>3}>" for i in range(128)),
]  # fmt: skip


@cache
def _backend() -> Any:
    made = byte_level_backend()
    made.add_special_tokens(_SPECIAL)
    return made


def make_processor_files(family: str, directory: Path) -> None:
    """Write what a checkpoint of the family has beside its weights."""
    spec = SPECS[family]
    directory.mkdir(parents=True, exist_ok=True)
    _hf_tokenizer(spec).save_pretrained(directory)
    _hf_images(spec).save_pretrained(directory)
    config = {"model_type": spec.model_type, "vision_config": spec.vision}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"processor_class": spec.processor, **spec.options}
    (directory / "processor_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template(family))


def template(family: str) -> str:
    """The family's way to write images, in a plain chat; PaliGemma has no chats."""
    return _BARE if family == "paligemma" else _CHAT.format(image=SPECS[family].image)


def vision_info(family: str, tokenizer: Tokenizer) -> VisionInfo:
    spec = SPECS[family]
    token = tokenizer.token_id(spec.embedded)
    assert token is not None
    facts = {"num_levels": 1, "has_grid_positions": False, **spec.info}
    return VisionInfo(family=spec.model_type, hidden_size=64, image_token_id=token, **facts)


@cache
def oracle(family: str) -> Any:
    """The processor of transformers; it lacks only videos, whose part wants torchvision."""
    spec = SPECS[family]
    base = _processor_class(spec)
    taking = {"check_argument_for_proper_class": lambda _self, _name, part: type(part)}
    made = type(base.__name__, (base,), taking)
    parts: dict[str, Any] = {"image_processor": _hf_images(spec), "tokenizer": _hf_tokenizer(spec)}
    if "video_processor" in base.get_attributes():
        parts["video_processor"] = None
    return made(**parts, **spec.options)


def oracle_inputs(family: str, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
    """What the processor makes of one prompt with all its images, as numpy arrays."""
    made = oracle(family)(
        images=[list(images)], text=[text], add_special_tokens=False, return_tensors="np"
    )
    return dict(made)


def _hf_tokenizer(spec: Spec) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_backend(), bos_token="<s>", eos_token="</s>", pad_token="</s>",
        extra_special_tokens=dict(spec.named),
    )  # fmt: skip


def _hf_images(spec: Spec) -> Any:
    settings = dict(spec.settings)
    length = settings.pop("image_seq_length", None)
    made = getattr(transformers, spec.images)(**settings)
    if length is not None:
        made.image_seq_length = length
    return made


def _processor_class(spec: Spec) -> Any:
    if spec.processor == "PixtralProcessor":
        # Its module imports a function from the torchvision side, which the other side has too.
        pixtral = "transformers.models.pixtral."
        stand_in = importlib.import_module(pixtral + "image_processing_pil_pixtral")
        sys.modules.setdefault(pixtral + "image_processing_pixtral", stand_in)
        return importlib.import_module(pixtral + "processing_pixtral").PixtralProcessor
    if spec.processor == "SmolVLMProcessor":
        smolvlm: Any = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
        smolvlm.num2words = smolvlm.num2words or str  # for videos
    return getattr(transformers, spec.processor)
