"""The vision-language families that are served, and what each of them wants.

A family's images go through its own `get_image_features`. The table tells which tensors that takes
of each image (an `ImageItem`'s `tensors`, under these names), and how those of several images are
joined for one run of the tower. What a processor makes must be cut to that shape, image by image.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """How one family takes images.

    Tensors of several images are joined along their first dimension; images whose tensors differ
    in the other dimensions run one after the other.
    """

    tensors: tuple[str, ...]
    is_nested: bool = False  # the joined tensors get a dimension of one in front
    has_grid_positions: bool = False  # positions have three rows: time, height, width (M-RoPE)
    has_levels: bool = False  # the tower gives further levels, added after the first layers
    first_position: int = 0  # where positions begin
    bidirectional: str = ""  # "image": each run of image tokens; "prefix": the whole prompt


_PIXELS = ("pixel_values",)
_SIZED = ("pixel_values", "image_sizes")
_GRID = ("pixel_values", "image_grid_thw")

# By transformers' model type. Shapes of one image's tensors:
#   llava          pixel_values [1, 3, H, W]; with a Pixtral tower also image_sizes [1, 2]
#   llava_next     pixel_values [tiles, 3, S, S] without padding tiles, image_sizes [1, 2]
#   llava_onevision  the same; one tile where a prompt has several images
#   qwen*_vl*, glm4*v*  pixel_values [patches, features], image_grid_thw [1, 3]
#   gemma3         pixel_values [1, 3, S, S], one item for each crop or several in one
#   paligemma      pixel_values [1, 3, S, S]
#   idefics3, smolvlm  pixel_values [tiles, 3, S, S], pixel_attention_mask [tiles, S, S]
#   internvl, aya_vision, cohere2_vision  pixel_values [tiles, 3, S, S]
#   mistral3       pixel_values [1, 3, H, W] without padding, image_sizes [1, 2]
#   lfm2_vl        pixel_values [tiles, patches, features], spatial_shapes [tiles, 2],
#                  pixel_attention_mask [tiles, patches]
FAMILIES: dict[str, VisionFamily] = {
    "llava": VisionFamily(tensors=_PIXELS),
    "llava_next": VisionFamily(tensors=_SIZED),
    "llava_onevision": VisionFamily(tensors=_SIZED),
    "qwen2_vl": VisionFamily(tensors=_GRID, has_grid_positions=True),
    "qwen2_5_vl": VisionFamily(tensors=_GRID, has_grid_positions=True),
    "qwen3_vl": VisionFamily(tensors=_GRID, has_grid_positions=True, has_levels=True),
    "qwen3_vl_moe": VisionFamily(tensors=_GRID, has_grid_positions=True, has_levels=True),
    "glm4v": VisionFamily(tensors=_GRID, has_grid_positions=True),
    "glm46v": VisionFamily(tensors=_GRID, has_grid_positions=True),
    "glm4v_moe": VisionFamily(tensors=_GRID, has_grid_positions=True),
    "gemma3": VisionFamily(tensors=_PIXELS, bidirectional="image"),
    "paligemma": VisionFamily(tensors=_PIXELS, bidirectional="prefix", first_position=1),
    "idefics3": VisionFamily(tensors=(*_PIXELS, "pixel_attention_mask"), is_nested=True),
    "smolvlm": VisionFamily(tensors=(*_PIXELS, "pixel_attention_mask"), is_nested=True),
    "internvl": VisionFamily(tensors=_PIXELS),
    "aya_vision": VisionFamily(tensors=_PIXELS),
    "cohere2_vision": VisionFamily(tensors=_PIXELS),
    "mistral3": VisionFamily(tensors=_SIZED),
    "lfm2_vl": VisionFamily(tensors=(*_PIXELS, "spatial_shapes", "pixel_attention_mask")),
}


def family_of(model_type: str, tower_type: str) -> VisionFamily | None:
    """The family of a config's model type, with the model type of its tower; None: not served."""
    if model_type == "llava" and tower_type == "pixtral":
        return VisionFamily(tensors=_SIZED)
    return FAMILIES.get(model_type)
