"""Tiny random vision-language checkpoints, one of each family that is served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from support.tiny_models import _SIZES, randomize

IMAGE_TOKEN = 300
BREAK_TOKEN = 301  # ends a row of patches, where the family has such
_TEXT = {**_SIZES}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_GRID_ROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "projection_dim": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 4,
    "rope_parameters": _ROPE,
}
PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_TOKENS = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}
_GRID_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 302,
    "vision_start_token_id": 303,
    "vision_end_token_id": 304,
}


@dataclass(frozen=True)
class Tiny:
    """One family: its classes, and what differs from the defaults."""

    name: str  # of transformers' classes, before ForConditionalGeneration and Config
    text: dict[str, Any]
    vision: dict[str, Any]
    fields: dict[str, Any]
    sizes: tuple[tuple[int, int], ...]  # height and width of example images, in units of `unit`
    unit: int = 8
    uses_token_types: str = ""  # how the family's forward wants to be told of images
    model_type: str = ""


def _text(model_type: str, **more: Any) -> dict[str, Any]:
    return {**_TEXT, "model_type": model_type, **more}


_ODD = ((2, 2), (1, 3), (4, 2), (3, 5))
FAMILIES: dict[str, Tiny] = {
    "llava": Tiny(
        "Llava",
        _text("llama"),
        _CLIP,
        {**_TOKENS, "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        ((2, 2),) * 3,
    ),
    "llava_pixtral": Tiny(
        "Llava",
        _text("mistral", sliding_window=None, head_dim=16),
        _PIXTRAL,
        {**_TOKENS, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        _ODD,
        unit=4,
    ),
    "qwen2_vl": Tiny(
        "Qwen2VL",
        _text("qwen2_vl_text", rope_parameters=_GRID_ROPE),
        {
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        _GRID_TOKENS,
        _ODD,
        uses_token_types="mm_token_type_ids",
    ),
    "qwen2_5_vl": Tiny(
        "Qwen2_5_VL",
        _text("qwen2_5_vl_text", rope_parameters=_GRID_ROPE),
        {
            "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 64,
        },
        _GRID_TOKENS,
        _ODD,
        uses_token_types="mm_token_type_ids",
    ),
    "qwen3_vl": Tiny(
        "Qwen3VL",
        _text("qwen3_vl_text", head_dim=16, rope_parameters={**_GRID_ROPE}),
        {
            "depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "num_position_embeddings": 16, "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 2],
        },
        _GRID_TOKENS,
        _ODD,
        uses_token_types="mm_token_type_ids",
    ),
    "gemma3": Tiny(
        "Gemma3",
        _text(
            "gemma3_text", num_hidden_layers=4, head_dim=16, query_pre_attn_scalar=16,
            sliding_window=12, layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        {**_SIGLIP, "image_size": 32, "patch_size": 4},
        {"image_token_id": IMAGE_TOKEN, "mm_tokens_per_image": 16, "boi_token_index": 302,
         "eoi_token_index": 303},
        ((4, 4),) * 3,
        uses_token_types="token_type_ids",
    ),
    "idefics3": Tiny(
        "Idefics3",
        _text("llama"),
        {**_SIGLIP, "model_type": "idefics3_vision"},
        {"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "pad_token_id": 0},
        ((1, 1), (1, 2), (3, 1)),  # in tiles
        unit=16,
    ),
    "smolvlm": Tiny(
        "SmolVLM",
        _text("llama"),
        {**_SIGLIP, "model_type": "smolvlm_vision"},
        {"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "pad_token_id": 0},
        ((1, 1), (1, 2), (3, 1)),
        unit=16,
    ),
    "internvl": Tiny(
        "InternVL",
        _text("qwen2"),
        {
            "model_type": "internvl_vision", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": [16, 16],
            "patch_size": [4, 4], "use_qk_norm": True,
        },
        {"image_token_id": IMAGE_TOKEN, "downsample_ratio": 0.5, "image_seq_length": 4},
        ((1, 1), (1, 2), (2, 2)),
        unit=16,
    ),
    "mistral3": Tiny(
        "Mistral3",
        _text("mistral", sliding_window=None, head_dim=16),
        _PIXTRAL,
        {**_TOKENS, "spatial_merge_size": 2, "vision_feature_layer": -1},
        _ODD,
    ),
    "llava_next": Tiny(
        "LlavaNext",
        _text("llama"),
        _CLIP,
        {
            **_TOKENS, "image_grid_pinpoints": PINPOINTS, "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        ((16, 16), (9, 31), (40, 13)),  # of the original, in pixels
        unit=1,
    ),
    "llava_onevision": Tiny(
        "LlavaOnevision",
        _text("qwen2"),
        _SIGLIP,
        {
            **_TOKENS, "image_grid_pinpoints": PINPOINTS, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9",
        },
        ((16, 16), (9, 31), (40, 13)),
        unit=1,
    ),
    "paligemma": Tiny(
        "PaliGemma",
        _text("gemma", head_dim=16),
        _SIGLIP,
        {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, "projection_dim": 64},
        ((2, 2),),
        uses_token_types="token_type_ids",
    ),
    "qwen3_vl_moe": Tiny(
        "Qwen3VLMoe",
        _text(
            "qwen3_vl_moe_text", head_dim=16, rope_parameters={**_GRID_ROPE}, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=48,
        ),
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "num_position_embeddings": 16, "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        _GRID_TOKENS,
        _ODD,
        uses_token_types="mm_token_type_ids",
    ),
    "glm4v": Tiny(
        "Glm4v",
        _text("glm4v_text", rope_parameters={**_GRID_ROPE, "partial_rotary_factor": 1.0}),
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "image_size": 16, "out_hidden_size": 64,
        },
        _GRID_TOKENS,
        _ODD,
        uses_token_types="mm_token_type_ids",
    ),
    "glm46v": Tiny(
        "Glm46V",
        _text("glm4v_text", rope_parameters={**_GRID_ROPE, "partial_rotary_factor": 1.0}),
        {
            "model_type": "glm4v_vision",
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "image_size": 16, "out_hidden_size": 64,
        },
        _GRID_TOKENS,
        _ODD,
        uses_token_types="mm_token_type_ids",
    ),
    "glm4v_moe": Tiny(
        "Glm4vMoe",
        _text("glm4v_moe_text", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
            n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=16, n_shared_experts=1,
            rope_parameters={**_GRID_ROPE, "partial_rotary_factor": 1.0}),
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "image_size": 16, "out_hidden_size": 64,
        },
        _GRID_TOKENS,
        _ODD,
        uses_token_types="mm_token_type_ids",
    ),
    "aya_vision": Tiny(
        "AyaVision",
        _text("cohere2", sliding_window=12, logit_scale=0.5),
        _SIGLIP,
        {
            "image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, "downsample_factor": 2,
            "adapter_layer_norm_eps": 1e-6, "alignment_intermediate_size": 64,
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        ((1, 1), (1, 2), (2, 2)),
        unit=16,
    ),
    "cohere2_vision": Tiny(
        "Cohere2Vision",
        _text("cohere2", sliding_window=12, logit_scale=0.5),
        _SIGLIP,
        {
            "image_token_id": IMAGE_TOKEN, "downsample_factor": 2,
            "alignment_intermediate_size": 64,
        },
        ((1, 1), (1, 2), (2, 2)),
        unit=16,
    ),
}  # fmt: skip


def make_vision_model(
    family: str, *, seed: int = 0, is_tied: bool = False, **overrides: Any
) -> Any:
    """A tiny random transformers model of `family`, in fp32 and eval mode.

    `overrides` are fields of the text config.
    """
    tiny = FAMILIES[family]
    config_class = getattr(transformers, f"{tiny.name}Config")
    config = config_class(
        text_config={**tiny.text, "tie_word_embeddings": is_tied, **overrides},
        vision_config=dict(tiny.vision),
        tie_word_embeddings=is_tied,
        **tiny.fields,
    )
    model = getattr(transformers, f"{tiny.name}ForConditionalGeneration")(config).eval()
    randomize(model, seed)
    with torch.no_grad():  # no answer holds tokens that mean images
        model.get_output_embeddings().weight[IMAGE_TOKEN:] = 0
    return model


def make_vision_checkpoint(family: str, directory: Path, **options: Any) -> Any:
    """Write `make_vision_model`'s into `directory`; returns transformers' of it, the oracle."""
    make_vision_model(family, **options).save_pretrained(directory)
    cls = getattr(transformers, f"{FAMILIES[family].name}ForConditionalGeneration")
    return cls.from_pretrained(directory, attn_implementation="eager").eval()
