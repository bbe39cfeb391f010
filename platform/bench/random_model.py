"""A Llama of random weights and any size: what it says is noise, what it reads is real."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Bits that a weight takes when packed, scales included.
BITS = {"none": 16.0, "int8": 8.25, "int4": 4.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a model; the head is the embedding table."""

    vocab_size: int
    num_layers: int
    hidden: int = 1024
    intermediate: int = 2816
    num_heads: int = 16
    num_kv_heads: int = 4

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return self.hidden // self.num_heads

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's matrices."""
        kv = self.num_kv_heads * self.head_size
        return self.hidden * (2 * self.hidden + 2 * kv + 3 * self.intermediate)

    @property
    def num_weights(self) -> int:
        """Of all matrices."""
        return self.vocab_size * self.hidden + self.num_layers * self.layer_weights


def shape_for(num_bytes: int, bits: float, vocab_size: int) -> LlamaShape:
    """The smallest whose matrices take at least `num_bytes` at so many bits a weight."""
    layer = LlamaShape(vocab_size=vocab_size, num_layers=1)
    wanted = num_bytes * 8 / bits - vocab_size * layer.hidden
    return LlamaShape(
        vocab_size=vocab_size, num_layers=max(1, math.ceil(wanted / layer.layer_weights))
    )


def write(shape: LlamaShape, tokenizer_json: str, folder: Path) -> None:
    """Write a checkpoint in bfloat16, as the hub has them. All layers hold the same numbers."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_json)
    save_file(_tensors(shape), folder / "model.safetensors", metadata={"format": "pt"})


def _tensors(shape: LlamaShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.randn((rows, columns), generator=generator)
        return (values / math.sqrt(columns)).bfloat16()

    hidden, kv = shape.hidden, shape.num_kv_heads * shape.head_size
    layer = {
        "self_attn.q_proj": matrix(hidden, hidden),
        "self_attn.k_proj": matrix(kv, hidden),
        "self_attn.v_proj": matrix(kv, hidden),
        "self_attn.o_proj": matrix(hidden, hidden),
        "mlp.gate_proj": matrix(shape.intermediate, hidden),
        "mlp.up_proj": matrix(shape.intermediate, hidden),
        "mlp.down_proj": matrix(hidden, shape.intermediate),
        "input_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
        "post_attention_layernorm": torch.ones(hidden, dtype=torch.bfloat16),
    }
    tensors = {
        f"model.layers.{index}.{name}.weight": values.clone()  # a file holds each on its own
        for index in range(shape.num_layers)
        for name, values in layer.items()
    }
    tensors["model.embed_tokens.weight"] = matrix(shape.vocab_size, hidden)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return tensors
