"""Tiny random checkpoints of every family we test, saved the way the hub has them.

`make_checkpoint("llama", directory)` writes a config, weights and a small byte-level tokenizer
with a chat template, and returns the directory. The weights are random but not flat: greedy
tokens are well separated, so that two implementations which agree give the same tokens.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_SIZE = 300
VOCAB_SIZE = 307  # odd, and wider than the tokenizer: both happen in the wild
EOS_TOKEN_ID = 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog. Hello world! How are you today? "
    "The capital of France is Paris. One two three four five, and then there was the sea."
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

# family → (model class, config class, what differs from _SIZES)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 12, "head_dim": 32}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_MOE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "layer_types": _WINDOWS,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 12,
            "layer_types": _WINDOWS,
        },
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": 20}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": True},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {}),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.3,
        },
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {"num_key_value_heads": 4}),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 12,
            "layer_types": _WINDOWS,
            "logit_scale": 0.5,
        },
    ),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        {"sliding_window": 20, "use_bias": True},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": _WINDOWS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # Latent attention, expanded: values are narrower than keys.
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # Learned positions, weights stored transposed.
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_positions": 512}),
}

FAMILIES: tuple[str, ...] = tuple(_FAMILIES)


def make_checkpoint(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = True,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a tiny random checkpoint of `family` (one of `FAMILIES`) and return `directory`.

    `overrides` replace fields of the config. The same arguments give the same weights.
    """
    model = make_model(family, seed=seed, **overrides).to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        make_tokenizer().save_pretrained(directory)
    return Path(directory)


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random transformers model of `family`, in fp32 and eval mode."""
    model_name, config_name, fields = _FAMILIES[family]
    config = getattr(transformers, config_name)(**{**_SIZES, **fields, **overrides})
    model = getattr(transformers, model_name)(config).eval()
    randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    """Fill every parameter with values that keep activations near one and logits apart."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:  # norms (centred at one, or at zero for the 1 + w form), biases, sinks
            parameter.add_(0.2 * noise)
    # A tied head would otherwise repeat the last token for ever.
    scale = 0.1 if model.config.tie_word_embeddings else 1.0
    embedding = model.get_input_embeddings().weight
    embedding.copy_(scale * torch.randn(embedding.shape, generator=generator))
    model.tie_weights()


@cache
def _byte_level_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    return tokenizer.to_str()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 tokens that round-trips any text, with a chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level_tokenizer()),
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def rewrite_config(directory: Path, **changes: Any) -> Path:
    """Change fields of a saved `config.json`; a value of None removes the field."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory
