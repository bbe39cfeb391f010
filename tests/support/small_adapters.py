"""Tiny random LoRA adapters for the tiny checkpoints, written without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
}


def make_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors that change every layer of the tiny llama, differently for each seed."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for module, size in (("q_proj", 64), ("v_proj", 32)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, 64, generator=random) * 0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn(size, 4, generator=random) * 0.5
    return tensors


def write_small_adapter(directory: Path, seed: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(make_tensors(seed), directory / "adapter_model.safetensors")
    return directory
