"""Adapters of every kind for the tiny checkpoints, and PEFT's own logits for each.

A `World` is one checkpoint with transformers' model, our executor, and what was made for both.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from support.adapter_driver import AdapterTrack, place, random_prompt, run
from support.peft_adapters import EXPERT_KINDS, KINDS, LINEAR, fill_adapter, load_base, quiet
from support.tiny_models import VOCAB_SIZE, make_checkpoint

from plait.adapters.adapter import Adapter
from plait.adapters.composition import last_occurrence
from plait.platform.config import Options
from plait.platform.core import AdapterUse
from plait.platform.model import load_model

PHI = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
NEOX = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "down_proj"]
R4: dict[str, Any] = {"r": 4, "lora_alpha": 8}
NEW_TOKENS = [5, VOCAB_SIZE, VOCAB_SIZE + 2]

# name → (fields of the LoraConfig, tokens added to the vocabulary)
_TABLES: dict[str, dict[str, Any]] = {
    name: KINDS[name]
    for name in ("embedding", "saved_embedding", "trained_tokens", "linear", "patterns", "dora")
}
_GROWN: dict[str, dict[str, Any]] = {
    "new_tokens": {
        **R4,
        "target_modules": ["q_proj"],
        "trainable_token_indices": NEW_TOKENS,
        "num_new_tokens": 3,
    },
    "new_tokens_saved": {
        **R4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
        "num_new_tokens": 2,
    },
    "new_tokens_saved_head": {
        **R4,
        "target_modules": ["v_proj"],
        "modules_to_save": ["lm_head"],
        "num_new_tokens": 3,
    },
    "new_tokens_low_rank": {
        **R4,
        "target_modules": ["embed_tokens", "lm_head", "o_proj"],
        "num_new_tokens": 3,
    },
}
_PHI = {
    "fused": {**R4, "target_modules": PHI},
    "fused_dora": {**R4, "target_modules": PHI, "use_dora": True},
    "fused_rank_64": {"r": 64, "lora_alpha": 16, "target_modules": PHI},
}
_GPT2 = {
    "transposed": {
        **R4,
        "target_modules": ["c_attn", "c_proj", "c_fc"],
        "fan_in_fan_out": True,
    },
    "transposed_dora": {
        **R4,
        "target_modules": ["c_attn", "c_fc"],
        "fan_in_fan_out": True,
        "use_dora": True,
    },
    "embedding": {**R4, "target_modules": ["wte", "c_attn"], "fan_in_fan_out": True},
    "transposed_parameters": {
        **R4,
        "target_modules": [],
        "target_parameters": ["attn.c_proj.weight", "c_attn.weight"],
    },
    "trained_tokens": {
        **R4,
        "target_modules": ["c_fc"],
        "fan_in_fan_out": True,
        "trainable_token_indices": {"wte": [9, 33]},
    },
}
_NEOX = {
    "fused": {**R4, "target_modules": NEOX},
    "fused_dora": {**R4, "target_modules": NEOX, "use_dora": True},
    "tables": {**R4, "target_modules": ["embed_in", "lm_head"]},
}
_OSS = {
    "experts": {
        "r": 3,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
_PARAMETERS = {
    "plain_parameters": {
        **R4,
        "target_modules": [],
        "target_parameters": ["q_proj.weight", "mlp.down_proj.weight"],
    },
}
_EMBEDDING_DORA = {"embedding_dora": {**R4, "target_modules": ["embed_tokens"], "use_dora": True}}


def _random_configs(count: int, seed: int) -> dict[str, dict[str, Any]]:
    """Configurations for families with llama's names, drawn at random."""
    rng = random.Random(seed)
    configs: dict[str, dict[str, Any]] = {}
    for number in range(count):
        targets = rng.sample(LINEAR, rng.randint(1, len(LINEAR)))
        config: dict[str, Any] = {
            "r": rng.choice([1, 2, 3, 7, 16, 17, 33, 65, 128]),
            "lora_alpha": rng.choice([1, 4, 16, 32]),
            "target_modules": targets,
            "use_rslora": rng.random() < 0.3,
            rng.choice(["use_dora", "lora_bias"]): rng.random() < 0.5,
        }
        if rng.random() < 0.4:
            config["layers_to_transform"] = sorted(rng.sample(range(3), rng.randint(1, 2)))
        if rng.random() < 0.4:
            config["rank_pattern"] = {rng.choice(targets): rng.choice([1, 5, 18])}
            config["alpha_pattern"] = {rng.choice(targets): rng.choice([2, 9])}
        configs[f"random_{number}"] = config
    return configs


MATRIX: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        **KINDS,
        **_GROWN,
        **_PARAMETERS,
        **_EMBEDDING_DORA,
        **_random_configs(10, seed=1),
    },
    "qwen2": {**_TABLES, **_EMBEDDING_DORA, "new_tokens": _GROWN["new_tokens"]},
    "qwen3": _random_configs(6, seed=2),
    "gemma2": {**_TABLES, "new_tokens": _GROWN["new_tokens"]},
    "gemma3": {**_TABLES, **_EMBEDDING_DORA},
    "granite": {"tables": KINDS["embedding_and_head"], "saved_head": KINDS["saved_head"]},
    "cohere2": {"linear": KINDS["linear"], "trained_tokens": KINDS["trained_tokens"]},
    "phi3": _PHI,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
    "starcoder2": {
        "biases_dora": {**R4, "target_modules": ["q_proj", "v_proj", "c_fc"], "use_dora": True},
    },
    "qwen3_moe": {**EXPERT_KINDS, "attention": KINDS["attention"]},
    "mixtral": {**EXPERT_KINDS},
    "gpt_oss": _OSS,
    "deepseek_v3": {"latent": {**R4, "target_modules": LATENT}},
}
CASES = [(family, name) for family, configs in MATRIX.items() for name in configs]


@dataclass
class Case:
    """One adapter: what PEFT's logits for its prompt are, and how we are asked for the same."""

    name: str
    adapter: Adapter
    prompt: list[int]
    wanted: torch.Tensor

    def track(self, *, num_output: int = 1, start_step: int = 0) -> AdapterTrack:
        start = last_occurrence(tuple(self.prompt), self.adapter.info.invocation_token_ids)
        use = AdapterUse(generation=self.name, active_from=start or 0)
        return AdapterTrack(list(self.prompt), num_output, start_step=start_step, uses=(use,))


@dataclass
class World:
    """One checkpoint."""

    family: str
    folder: Path
    dtype: str = "float32"
    cases: dict[str, Case] = field(default_factory=dict)

    @cached_property
    def checkpoint(self) -> Path:
        return make_checkpoint(self.family, self.folder / "checkpoint")

    @cached_property
    def base(self) -> Any:
        return load_base(self.checkpoint)

    @cached_property
    def executor(self) -> Any:
        return load_model(Options(model=str(self.checkpoint), dtype=self.dtype)).executor

    def case(self, name: str) -> Case:
        """The case of that name, made at its first use."""
        if name not in self.cases:
            self.cases[name] = self._make(name)
        return self.cases[name]

    @torch.no_grad()
    def _make(self, name: str) -> Case:
        from peft import LoraConfig, get_peft_model

        fields = dict(MATRIX[self.family][name])
        num_new = fields.pop("num_new_tokens", 0)
        seed = len(self.cases)
        prompt = random_prompt(17 + seed % 5, seed)
        prompt[3:5] = [5, 17]
        if num_new:
            prompt[7:10] = [VOCAB_SIZE, 40, VOCAB_SIZE + num_new - 1]
        if "alora_invocation_tokens" in fields:
            prompt[2:5] = prompt[9:12] = fields["alora_invocation_tokens"]
        with quiet():
            model = copy.deepcopy(self.base)
            if num_new:
                model.resize_token_embeddings(VOCAB_SIZE + num_new, mean_resizing=False)
            model = get_peft_model(model, LoraConfig(**fields))
            fill_adapter(model, seed=seed, strength=0.5)
            model.save_pretrained(self.folder / name)
            wanted = model.eval()(input_ids=torch.tensor([prompt])).logits[0]
        return Case(name, place(self.executor, self.folder / name, name), prompt, wanted)


def alone(world: World, track: AdapterTrack) -> torch.Tensor:
    """The track's logits, computed with nothing else in the step."""
    return run(world.executor, [track], seed=5)[0]
