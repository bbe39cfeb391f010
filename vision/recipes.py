"""How each vision-language family's images are processed, and what one image brings.

A family's own processor, of transformers, makes an image's tensors and the text that stands for it
in the prompt. The table tells which processor that is and which of its tensors the model takes;
`plait.platform.model.families` tells what the model does with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is needed to process images of one family.

    `processor` is transformers' class; "" is ours, see `plait.vision.expansion`. `names` are what
    checkpoints call it.
    """

    processor: str
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    tiles_one_alone: bool = False  # an image among others is not cut into tiles
    begins_behind: bool = False  # the text proper begins behind the images, and ends with its line


_PIXELS = ("pixel_values",)
_SIZED = ("pixel_values", "image_sizes")
_GRID = ("pixel_values", "image_grid_thw")
_MASKED = ("pixel_values", "pixel_attention_mask")


def _plain(processor: str, tensors: tuple[str, ...], *names: str, **more: bool) -> Recipe:
    return Recipe(processor=processor, names=(processor, *names), tensors=tensors, **more)


_PIXTRAL = Recipe(processor="", names=("PixtralProcessor", "LlavaProcessor"), tensors=_SIZED)
# By transformers' model type.
RECIPES: dict[str, Recipe] = {
    "llava": _plain("LlavaProcessor", _PIXELS),
    "llava_next": _plain("LlavaNextProcessor", _SIZED),
    "llava_onevision": _plain("LlavaOnevisionProcessor", _SIZED, tiles_one_alone=True),
    "qwen2_vl": _plain("Qwen2VLProcessor", _GRID),
    "qwen2_5_vl": _plain("Qwen2_5_VLProcessor", _GRID, "Qwen2VLProcessor"),
    "qwen3_vl": _plain("Qwen3VLProcessor", _GRID),
    "qwen3_vl_moe": _plain("Qwen3VLProcessor", _GRID),
    "glm4v": _plain("Glm4vProcessor", _GRID),
    "glm4v_moe": _plain("Glm4vProcessor", _GRID),
    "glm46v": _plain("Glm46VProcessor", _GRID),
    "gemma3": _plain("Gemma3Processor", _PIXELS),
    "paligemma": _plain("PaliGemmaProcessor", _PIXELS, begins_behind=True),
    "idefics3": _plain("Idefics3Processor", _MASKED),
    # SmolVLM's writes the same for images, but needs a package for videos to be made at all.
    "smolvlm": _plain("Idefics3Processor", _MASKED, "SmolVLMProcessor"),
    "internvl": _plain("InternVLProcessor", _PIXELS),
    "aya_vision": _plain("AyaVisionProcessor", _PIXELS),
    "mistral3": _PIXTRAL,
}
# Families whose processors transformers has for torchvision alone, which Plait does not use.
NEEDS_TORCHVISION = ("cohere2_vision", "lfm2_vl")


def recipe_of(config: Mapping[str, Any]) -> Recipe | None:
    """The recipe for a model's config.json; None: its images cannot be processed."""
    family = config.get("model_type")
    if family == "llava" and (config.get("vision_config") or {}).get("model_type") == "pixtral":
        return _PIXTRAL
    return RECIPES.get(str(family))
