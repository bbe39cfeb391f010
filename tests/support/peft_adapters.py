"""PEFT adapters with random weights for the tiny checkpoints, saved the way training saves them.

`make_adapter(checkpoint, directory, r=4, target_modules=["q_proj"])` wraps the checkpoint with
PEFT, fills everything that PEFT would train with random values that are nowhere zero, and saves
it. `make_kind("dora", checkpoint, directory)` makes one of the `KINDS`. `load_peft` is the oracle:
the checkpoint with the saved adapter, as PEFT reads it.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support.tiny_models import VOCAB_SIZE
from transformers import AutoModelForCausalLM

QKV = ["q_proj", "k_proj", "v_proj"]
LINEAR = [*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"]  # of the llama family

# For families with llama's names; name → fields of the LoraConfig.
KINDS: dict[str, dict[str, Any]] = {
    "q_only": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
    "attention": {"r": 8, "lora_alpha": 16, "target_modules": [*QKV, "o_proj"]},
    "linear": {"r": 8, "lora_alpha": 16, "target_modules": LINEAR},
    "rank_1": {"r": 1, "lora_alpha": 2, "target_modules": LINEAR},
    "rank_128": {"r": 128, "lora_alpha": 64, "target_modules": LINEAR},
    "rslora": {"r": 5, "lora_alpha": 4, "use_rslora": True, "target_modules": LINEAR},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": LINEAR,
        "rank_pattern": {"0.self_attn.q_proj": 7, "down_proj": 2, r"layers\.[12].*up_proj": 3},
        "alpha_pattern": {"v_proj": 3, "1.mlp.gate_proj": 12},
    },
    "partial_layers": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "last_layer_no_kv": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "layers_to_transform": [2],
        "layers_pattern": "layers",
    },
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": LINEAR},
    "lora_bias": {"r": 4, "lora_alpha": 8, "lora_bias": True, "target_modules": LINEAR},
    "embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"]},
    "head": {"r": 4, "lora_alpha": 8, "target_modules": ["lm_head"]},
    "embedding_and_head": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head"]},
    "saved_head": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head"],
    },
    "saved_embedding": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
    },
    "trained_tokens": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "trainable_token_indices": [290, 5, 17],
    },
    "alora": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": [*QKV],
        "task_type": "CAUSAL_LM",
        "alora_invocation_tokens": [3, 40, 41],
    },
}

# For families whose experts are parameters, such as qwen3_moe and mixtral.
EXPERT_KINDS: dict[str, dict[str, Any]] = {
    "experts": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "experts_up": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj"],
    },
    "experts_down_and_q": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.down_proj"],
    },
}


def make_kind(kind: str, checkpoint: Path, directory: Path, *, seed: int = 0) -> Path:
    """An adapter of one of the `KINDS` or `EXPERT_KINDS`, saved to `directory`."""
    return make_adapter(checkpoint, directory, seed=seed, **{**KINDS, **EXPERT_KINDS}[kind])


def make_adapter(
    checkpoint: Path,
    directory: Path,
    *,
    seed: int = 0,
    strength: float = 0.5,
    num_new_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    **lora_config: Any,
) -> Path:
    """Save a random adapter for `checkpoint` to `directory` and return that.

    `strength` is about the size of each change beside the weight it changes. New tokens widen the
    vocabulary from `VOCAB_SIZE` on. The same arguments give the same bytes.
    """
    from peft import LoraConfig, get_peft_model

    with quiet():
        base = load_base(checkpoint, num_new_tokens=num_new_tokens)
        model = get_peft_model(base, LoraConfig(**lora_config))
        fill_adapter(model, seed=seed, strength=strength)
        model.to(dtype).save_pretrained(directory)
    return Path(directory)


def load_base(checkpoint: Path, *, num_new_tokens: int = 0) -> Any:
    """The checkpoint as transformers reads it, in fp32, with rows for new tokens."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        if num_new_tokens:
            model.resize_token_embeddings(VOCAB_SIZE + num_new_tokens, mean_resizing=False)
    return model


def load_peft(checkpoint: Path, adapter: Path, *, num_new_tokens: int = 0) -> Any:
    """The oracle: the checkpoint with a saved adapter on it, as PEFT reads both, in fp32."""
    from peft import PeftModel

    with quiet():
        base = load_base(checkpoint, num_new_tokens=num_new_tokens)
        return PeftModel.from_pretrained(base, adapter).float().eval()


@torch.no_grad()
def fill_adapter(model: Any, *, seed: int, strength: float) -> None:
    """Give all that PEFT would train random values."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    for name, parameter in model.named_parameters():
        owner = name.split(".lora_")[0]
        if ".lora_magnitude_vector" in name:
            parameter.mul_(1 + 0.3 * noise(parameter).clamp(-2, 2))
        elif ".lora_embedding_A" in name:
            parameter.copy_(noise(parameter))
        elif ".lora_A" in name:
            parameter.copy_(noise(parameter) / parameter.shape[1] ** 0.5)
        elif ".lora_B" in name or ".lora_embedding_B" in name:
            layer = model.get_submodule(owner)
            size = strength / (layer.scaling["default"] * layer.r["default"] ** 0.5)
            parameter.copy_(noise(parameter) * size)
        elif ".trainable_tokens_delta" in name or ".modules_to_save." in name:
            parameter.add_(noise(parameter) * strength * parameter.std())


@contextmanager
def quiet() -> Any:
    """PEFT warns of much that is meant here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
